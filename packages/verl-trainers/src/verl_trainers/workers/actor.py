"""One rank of the policy as an actor: its engine, its weight sender, and the one thread that both compute on.

Owns which thread does what. Tensor work and collectives happen on a single thread, in the order of the calls, so ranks
cannot cross their collectives; the event loop stays free, so an abort reaches a transfer that blocks that thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from verl_contracts.clock import Deadline
from verl_contracts.errors import DataError, StateError, WaitTimeout
from verl_contracts.plugins import families, load_plugin
from verl_contracts.runtime import PayloadRef
from verl_contracts.samples import Trajectory
from verl_contracts.training import TrainRow, TrainSample
from verl_contracts.waits import bounded
from verl_trainers.workers.engine import FsdpEngine
from verl_trainers.workers.ranks import claim_process, join_ranks, leave_ranks, open_rendezvous
from verl_trainers.workers.source import OnePass

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import TCPStore

    from verl_contracts.runtime import ActorContext
    from verl_contracts.training import StepContext, StepResult, TrainBatch
    from verl_contracts.weights import EndpointInfo, Manifest, Plan, TransferReport, WeightSender
    from verl_trainers.workers.settings import EngineSettings

__all__ = ["PolicyActor"]

CLOSE_LIMIT_S = 5.0
"""Longest that `close` waits for work that is under way."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class PolicyActor:
    """One rank. `open_rendezvous` on rank 0 if there are several, `start`, then the rest; `close` last.

    Every rank's `update`, `sender_transfer` and `save` are collective: call them on all ranks, in one order.
    """

    def __init__(
        self, *, context: ActorContext, settings: EngineSettings, weight_backend: str, collective_limit_s: float
    ) -> None:
        self._context = context
        self._settings = settings
        self._collective_limit_s = collective_limit_s
        backend = load_plugin(
            families.WEIGHT_BACKEND, weight_backend, key=families.WEIGHT_BACKEND.key, role=f"policy[{settings.rank}]"
        )
        self._sender: WeightSender | None = None
        if settings.rank == 0:
            self._sender = backend.sender_class(owner="trainer", rank=0, clock=context.clock)  # type: ignore[call-arg]
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"policy-{settings.rank}",
            initializer=partial(torch.set_num_threads, settings.num_threads),
        )
        claim_process(rank=settings.rank, world_size=settings.world_size)
        self._store: TCPStore | None = None
        self._engine: FsdpEngine | None = None
        self._closed = False

    async def open_rendezvous(self, *, deadline: Deadline) -> str:
        """Open the store of all ranks here, and return its ``host:port``."""
        size = self._settings.world_size
        store = await self._compute("rendezvous", deadline, open_rendezvous, size, limit_s=self._collective_limit_s)
        self._store = store
        return f"{store.host}:{store.port}"

    async def start(self, *, rendezvous: str | None, deadline: Deadline) -> None:
        """Join the other ranks, if `rendezvous` says where they meet, and load the model."""
        self._engine = await self._compute("loading the policy", deadline, self._build, rendezvous)

    async def update(self, *, batch: TrainBatch, step: StepContext, deadline: Deadline) -> StepResult:
        """Fetch the payloads and do one step; the time of fetching is part of the result."""
        engine = self._started()
        begin = time.perf_counter()
        payloads = await asyncio.gather(*(self._fetch(row.payload, deadline) for row in batch.rows))
        samples = [
            TrainSample(row=row, trajectories=_trajectories(payload, f"sample {row.sample} of group {row.uid}"))
            for row, payload in zip(batch.rows, payloads, strict=True)
        ]
        fetched = time.perf_counter() - begin
        result = await self._compute(f"step {step.step}", deadline, engine.update, samples, step)
        return dataclasses.replace(result, seconds={"fetch": fetched, **result.seconds})

    async def log_probs(self, *, trajectories: tuple[Trajectory, ...], deadline: Deadline) -> list[list[float]]:
        """Return per trajectory [T] log-probs under the present policy; position 0 is 0."""
        samples = [
            TrainSample(row=_unscored(number, trajectory), trajectories=(trajectory,))
            for number, trajectory in enumerate(trajectories)
        ]
        found = await self._compute("log-probs", deadline, self._started().log_probs, samples)
        return [values.tolist() for values in found]

    async def perturb(self, *, scale: float, deadline: Deadline) -> None:
        """Change each weight by up to `scale` of itself."""
        await self._compute("changing the weights", deadline, self._started().perturb, scale)

    async def sender_prepare(
        self, *, version: int, session: str, deadline: Deadline
    ) -> tuple[Manifest, EndpointInfo | None]:
        """Return what will be sent and, on rank 0, where to get it."""
        manifest = self._started().weights().manifest(version)
        if self._sender is None:
            return manifest, None
        prepare = partial(self._sender.prepare, session=session)
        return manifest, await self._compute("preparing the transfer", deadline, prepare, manifest)

    async def sender_transfer(self, *, plan: Plan, deadline: Deadline) -> TransferReport | None:
        """Send the weights from rank 0, while the others take part in gathering them."""
        return await self._compute(f"sending version {plan.version}", deadline, self._send, plan, deadline)

    async def sender_abort(self, *, reason: str) -> None:
        """End a transfer that blocks the compute thread."""
        if self._sender is not None:
            self._sender.abort(reason)

    async def sender_close(self, *, deadline: Deadline) -> None:
        """Remove what `sender_prepare` made."""
        if self._sender is not None:
            await self._compute("closing the transfer", deadline, self._sender.close)

    async def save(self, *, path: str, deadline: Deadline) -> None:
        """Write a Hugging Face folder; rank 0 writes."""
        await self._compute(f"saving to {path}", deadline, self._started().save, path)

    async def close(self) -> None:
        """Remove what the sender made, leave the other ranks, stop the thread. Idempotent; bounded by itself."""
        if self._closed:
            return
        self._closed = True
        if self._sender is not None:
            self._sender.abort("the policy closes")
        try:
            await self._compute("leaving", Deadline.after(self._context.clock, CLOSE_LIMIT_S), self._leave)
        except WaitTimeout as exc:
            _log.warning("policy rank %d closes while it computes: %s", self._settings.rank, exc)
        finally:
            self._thread.shutdown(wait=False)

    def _build(self, rendezvous: str | None) -> FsdpEngine:
        settings = self._settings
        disable_progress_bar()  # type: ignore[no-untyped-call]
        if settings.device == "cuda":
            torch.cuda.set_device(0)  # the runtime shows each actor its own devices only
        if rendezvous is not None:
            join_ranks(
                self._store if self._store is not None else rendezvous,
                rank=settings.rank,
                world_size=settings.world_size,
                device=settings.device,
                limit_s=self._collective_limit_s,
            )
        return FsdpEngine(settings)

    def _send(self, plan: Plan, deadline: Deadline) -> TransferReport | None:
        weights = OnePass(self._started().weights())
        try:
            return self._sender.send(plan, weights, deadline=deadline) if self._sender is not None else None
        finally:
            weights.finish()  # for the other ranks, also when this one gave up half-way

    def _leave(self) -> None:
        try:
            if self._sender is not None:
                self._sender.close()
        finally:
            leave_ranks(world_size=self._settings.world_size)

    def _started(self) -> FsdpEngine:
        if self._engine is None:
            raise StateError(f"policy rank {self._settings.rank} was not started")
        return self._engine

    async def _fetch(self, ref: PayloadRef, deadline: Deadline) -> object:
        return ref.value if ref.token is None else await self._context.caller.get(ref, deadline=deadline)

    async def _compute(
        self, what: str, deadline: Deadline, function: Callable[..., T], /, *args: object, **kwargs: object
    ) -> T:
        """Run `function` on the compute thread. At the deadline the caller goes on; the thread ends when it can."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, partial(function, *args, **kwargs))
        holder = f"compute thread of policy[{self._settings.rank}]"
        return await bounded(work, subject=what, holder=holder, deadline=deadline, clock=self._context.clock)


def _unscored(number: int, trajectory: Trajectory) -> TrainRow:
    return TrainRow(
        uid=f"{number:06d}",
        sample=0,
        score=0.0,
        payload=PayloadRef(num_bytes=0),
        num_tokens=len(trajectory.ids),
        num_trained=trajectory.num_trained,
    )


def _trajectories(payload: object, where: str) -> tuple[Trajectory, ...]:
    if not isinstance(payload, tuple) or not all(isinstance(part, Trajectory) for part in payload):
        raise DataError(f"the payload of {where} must be a tuple of Trajectory, got {type(payload).__name__}")
    return payload
