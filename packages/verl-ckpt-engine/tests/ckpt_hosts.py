"""Small hosts and replicas around the real shm endpoints, with faults to order, for the tests of the manager."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from ckpt_transport import CLOCK, DictSource, DictTarget

from verl_ckpt_engine.shm import ShmReceiver, ShmSender
from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, StateError
from verl_contracts.failures import FailureRecord
from verl_contracts.rollout import INVALID, KEEP, PAUSED, SERVING, SLEEP, ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    import torch

    from verl_contracts.rollout import Capability, PauseMode, Replica, SupportsSleep
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import (
        EndpointInfo,
        LoadReport,
        Manifest,
        Plan,
        TensorMeta,
        TransferReport,
        WeightReceiverHost,
        WeightSenderHost,
    )


@dataclass
class Faults:
    """What goes wrong, once each: a phase in `raising` raises; in `hanging` it never returns."""

    raising: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)

    async def meet(self, phase: str) -> None:
        if phase in self.raising:
            self.raising.discard(phase)
            raise RuntimeError(f"injected in {phase}")
        if phase in self.hanging:
            self.hanging.discard(phase)
            async with asyncio.timeout(100):
                await asyncio.Event().wait()


async def eventually(reached: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Return once `reached()`."""
    async with asyncio.timeout(limit_s):
        while True:
            if reached():
                return
            await asyncio.sleep(0.002)


class SenderHost:
    """The trainer's side, one rank, in a thread."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.source = DictSource(weights)
        self.faults = Faults()
        self.sessions: list[str] = []
        self.aborts: list[str] = []
        self.closed = 0
        self._rank = ShmSender(owner="trainer", rank=0, clock=CLOCK)
        self._pool = ThreadPoolExecutor(1)

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        await self.faults.meet("prepare")
        self.sessions.append(session)
        manifest = self.source.manifest(version)
        return manifest, [self._rank.prepare(manifest, session=session)]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        await self.faults.meet("transfer")
        loop = asyncio.get_running_loop()
        report = await loop.run_in_executor(self._pool, lambda: self._rank.send(plan, self.source, deadline=deadline))
        return [report]

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        self._rank.abort(reason)
        self.aborts.append(reason)

    async def close(self, *, deadline: Deadline) -> None:
        self.closed += 1
        self._rank.close()

    def stop(self) -> None:
        self._pool.shutdown()


class ThreadReplica:
    """A replica whose engine is a dict, with its receiver in a thread of this process."""

    def __init__(self, replica_id: str) -> None:
        self._id = replica_id
        self.faults = Faults()
        self.target: Callable[[], DictTarget] = DictTarget
        self.loaded: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.paused = False
        self.calls: list[str] = []
        self.host = _ThreadReceiverHost(self)

    @property
    def replica_id(self) -> str:
        return self._id

    @property
    def capacity(self) -> int:
        return 1

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({KEEP})

    @property
    def receiver_host(self) -> WeightReceiverHost:
        return self.host

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        raise StateError("this replica holds weights, not a model")

    async def abort(self, request_ids: Sequence[str] | None, /, *, deadline: Deadline) -> None:
        self.calls.append("abort")

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        self.calls.append(f"pause:{mode}")
        self.paused = True
        await self.faults.meet("pause")

    async def resume(self, *, deadline: Deadline) -> None:
        self.calls.append("resume")
        await self.faults.meet("resume")
        self.paused = False

    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        state = PAUSED if self.paused else SERVING if self.version is not None else INVALID
        return ReplicaStatus(
            replica=self._id, state=state, version=self.version, running=0, waiting=0, generated_tokens=0
        )

    def stop(self) -> None:
        self.host.pool.shutdown()


class SleepyReplica(ThreadReplica):
    """A replica that can give its memory back."""

    asleep = False

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({KEEP, SLEEP})

    async def sleep(self, *, deadline: Deadline) -> None:
        if not self.paused:
            raise StateError("only a paused replica may sleep")
        await self.faults.meet("sleep")
        self.calls.append("sleep")
        self.asleep, self.version, self.loaded = True, None, {}

    async def wake(self, *, deadline: Deadline) -> None:
        await self.faults.meet("wake")
        self.calls.append("wake")
        self.asleep = False


class _ThreadReceiverHost:
    def __init__(self, replica: ThreadReplica) -> None:
        self._replica = replica
        self._rank = ShmReceiver(owner=replica.replica_id, clock=CLOCK)
        self.pool = ThreadPoolExecutor(1)
        self.lie: str | None = None
        self.closed = 0

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        await self._replica.faults.meet("prepare")
        return [self._rank.prepare(session=session, rank=0)]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        self._replica.version = None
        await self._replica.faults.meet("transfer")
        target = self._replica.target()
        loop = asyncio.get_running_loop()
        report = await loop.run_in_executor(self.pool, lambda: self._rank.receive(plan, target, deadline=deadline))
        self._replica.loaded = target.weights
        if self.lie is not None:
            digests, self.lie = {**report.digests, self.lie: 1}, None
            return [replace(report, digests=digests)]
        return [report]

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        self._replica.calls.append(f"commit:{keep_cache}")
        await self._replica.faults.meet("commit")
        self._replica.version = version

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        self._rank.abort(reason)

    async def close(self, *, deadline: Deadline) -> None:
        self.closed += 1
        self._rank.close()


class ProcessReplica(ThreadReplica):
    """A replica whose receiver lives in a spawned process, which kills itself at tensor `die_at` (from 1)."""

    def __init__(self, replica_id: str, *, die_at: int | None = None) -> None:
        super().__init__(replica_id)
        self._process = _ProcessReceiverHost(self, die_at)

    @property
    def receiver_host(self) -> WeightReceiverHost:
        return self._process

    def stop(self) -> None:
        super().stop()
        self._process.stop()


class _ProcessReceiverHost:
    def __init__(self, replica: ThreadReplica, die_at: int | None) -> None:
        self._replica = replica
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, replica.replica_id, die_at), daemon=True)
        self._child.start()
        theirs.close()

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        return [cast("EndpointInfo", await self._ask("prepare", session, deadline))]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        self._replica.version = None
        return [cast("TransferReport", await self._ask("transfer", (plan, deadline.remaining(CLOCK)), deadline))]

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        self._replica.version = version

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """Nothing: these tests abort no process."""

    async def close(self, *, deadline: Deadline) -> None:
        if self._child.is_alive():
            await self._ask("close", None, deadline)

    async def _ask(self, what: str, argument: object, deadline: Deadline) -> object:
        def call() -> object:
            self._pipe.send((what, argument))
            if not self._pipe.poll(deadline.remaining(CLOCK)):
                raise TimeoutError(what)
            return self._pipe.recv()

        try:
            answer = await asyncio.to_thread(call)
        except (EOFError, BrokenPipeError, ConnectionResetError) as exc:
            record = FailureRecord(role="replica", rank=0, node="here", cause="killed by signal 9")
            raise ActorFailed(record) from exc
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self._child.kill()
        self._child.join(10)


class _DyingTarget(DictTarget):
    def __init__(self, die_at: int) -> None:
        super().__init__()
        self._die_at = die_at

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        def dying() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
            for index, item in enumerate(items, start=1):
                if index == self._die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield item

        return super().load(dying())


def _serve(pipe: Connection, owner: str, die_at: int | None) -> None:
    receiver = ShmReceiver(owner=owner, clock=CLOCK)
    while True:
        try:
            what, argument = pipe.recv()
        except EOFError:
            return
        answer: object = None
        try:
            if what == "prepare":
                answer = receiver.prepare(session=argument, rank=0)
            elif what == "transfer":
                plan, limit_s = argument
                target = DictTarget() if die_at is None else _DyingTarget(die_at)
                answer = receiver.receive(plan, target, deadline=Deadline.after(CLOCK, limit_s))
            else:
                receiver.close()
        except Exception as exc:
            answer = exc
        pipe.send(answer)


if TYPE_CHECKING:

    def _is_sender(x: SenderHost) -> WeightSenderHost:
        return x

    def _is_replica(x: ThreadReplica) -> Replica:
        return x

    def _is_sleeper(x: SleepyReplica) -> SupportsSleep:
        return x

    def _is_receiver(x: _ThreadReceiverHost) -> WeightReceiverHost:
        return x
