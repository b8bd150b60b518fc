"""The embedded engine's asyncio face: it hands requests to one compute thread, and results back in batches.

It owns the thread and the answer to "what may happen now": a gate (open, draining, closed), whether weights are
committed, whether the memory is there. It prevents a request from decoding with weights that nobody verified, and a
caller from waiting for a thread that died.

Everything that touches the decoder runs on the compute thread, between two iterations, in the order in which it was
asked for. What is asked in one tick of the loop arrives together, so that a burst of requests is admitted as one batch.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast

import torch

from verl_contracts.clock import Deadline
from verl_contracts.errors import DataError, StateError, VerlError, WaitTimeout
from verl_contracts.rollout import ASLEEP, DEAD, INVALID, KEEP, PAUSED, SERVING, SLEEP
from verl_contracts.waits import bounded
from verl_rollout.engine.base import NoOptions
from verl_rollout.engine.receiving import InProcessReceiverHost, not_loaded
from verl_rollout.engine.requests import check_request
from verl_rollout.engine.torch.answers import Answers
from verl_rollout.engine.torch.checkpoint import check_manifest
from verl_rollout.engine.torch.decoder import Decoder, Job, Result
from verl_rollout.engine.torch.model import Shape, allocate, build_model, release
from verl_rollout.engine.torch.target import ModelTarget

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from transformers import PreTrainedModel

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Capability, PauseMode, ReplicaState, ReplicaStatus, RolloutSettings
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import Manifest, WeightReceiverHost, WeightTarget
    from verl_rollout.engine.base import Engine

__all__ = ["TorchEngine"]

_log = logging.getLogger(__name__)

_CONTROL_LIMIT_S = 60.0
"""Longest that a control call may wait for the iteration that is running."""
_IDLE_S = 1.0
"""Longest that the idle thread sleeps before it looks again."""
_JOIN_LIMIT_S = 60.0
"""Longest that closing waits for the iteration that is running."""


class TorchEngine:
    """Iteration-level batching over a transformers model, see `verl_rollout.engine.base.Engine`."""

    Config: ClassVar[type] = NoOptions

    def __init__(
        self, model: PreTrainedModel, shape: Shape, settings: RolloutSettings, *, replica_id: str, clock: Clock
    ) -> None:
        self._model = model
        self._shape = shape
        self._settings = settings
        self._replica_id = replica_id
        self._clock = clock
        self._decoder = Decoder(model, shape, settings, replica_id=replica_id)
        self._receivers = InProcessReceiverHost(self, backend=settings.weight_backend, owner=replica_id, clock=clock)
        # Loop side.
        self._answers = Answers()
        self._request_ids: set[str] = set()
        self._unsent: list[Callable[[], None]] = []
        # Shared, under `_changed`.
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._gate: Literal["open", "draining", "closed"] = "open"
        self._accepts = False
        self._update: Literal["none", "begun", "loaded"] = "none"
        self._sleeping: dict[str, torch.Size] | None = None
        self._closing = False
        self._error: Exception | None = None
        # Compute side.
        self._outbox: list[tuple[int, object]] = []
        self._pausers: list[int] = []
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"engine-{replica_id}", daemon=True)
        self._thread.start()
        # A thread that still computes when the interpreter goes away takes the process down with an abort.
        atexit.register(self._halt)

    @classmethod
    def create(cls, settings: RolloutSettings, /, *, replica_id: str, rank: int, clock: Clock) -> Self:
        """Build the model with empty parameters and the cache, and start the thread."""
        model, shape = build_model(settings)
        return cls(model, shape, settings, replica_id=replica_id, clock=clock)

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence; see `Engine.generate`."""
        self._check(request)
        job = Job(request=request, ticket=self._answers.ticket())
        self._request_ids.add(request.request_id)
        answer = self._post(job.ticket, lambda: self._submit(job))
        try:
            value = await self._bounded(answer, f"request {request.request_id!r}", deadline)
        except (WaitTimeout, asyncio.CancelledError):
            self._answers.forget(job.ticket)
            if self._error is None and not self._closing:
                self._send(lambda: self._drop(job))
            raise
        finally:
            self._request_ids.discard(request.request_id)
        return cast("Completion | AbortedCompletion", value)

    async def abort(self, request_ids: Sequence[str] | None, /, *, reason: str) -> None:
        """Cut these requests, or all."""
        wanted = None if request_ids is None else frozenset(request_ids)

        def cut() -> None:
            chosen = self._decoder.abort(lambda job: wanted is None or job.request.request_id in wanted, reason=reason)
            self._give(chosen)

        await self._ask(cut, "abort")

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Return once nothing is decoded."""
        self._raise_if_dead()
        ticket = self._answers.ticket()
        answer = self._post(ticket, lambda: self._pause(mode, ticket))
        await self._bounded(answer, f"pause ({mode})", deadline)

    async def resume(self) -> None:
        """Decode again, unless invalid; then what waited is refused and what was frozen comes back aborted."""
        await self._ask(self._resume, "resume")

    def status(self) -> ReplicaStatus:
        """Return the present status, at once."""
        return self._decoder.status(self._state(), busy_s=self._busy_s)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All of it."""
        return frozenset({SLEEP, KEEP})

    @property
    def receiver_host(self) -> WeightReceiverHost:
        """The receiver of its one rank."""
        return self._receivers

    def target(self) -> WeightTarget:
        """Return the loader of the live model."""
        return ModelTarget(self._model, guard=self._require_update, loaded=self._set_loaded)

    def check_manifest(self, manifest: Manifest, /) -> None:
        """Compare names and shapes with the model's; asleep it has none, and loading checks them all the same."""
        if self._sleeping is None:
            check_manifest(manifest, self._model)

    def begin_update(self) -> None:
        """Declare the weights invalid until `commit`."""
        with self._changed:
            self._raise_if_dead()
            if self._gate != "closed" or self._sleeping is not None:
                raise StateError(f"replica {self._replica_id} is {self._state()}; pause and wake it before an update")
            self._decoder.version = None
            self._update = "begun"

    async def commit(self, version: int, /, *, keep_cache: bool) -> None:
        """Declare the loaded weights to be `version`."""
        await self._ask(lambda: self._commit(version, keep_cache=keep_cache), "commit")

    async def sleep(self) -> None:
        """Free weights and cache; frozen sequences come back aborted."""
        await self._ask(self._sleep, "sleep")

    async def wake(self) -> None:
        """Allocate again."""
        await self._ask(self._wake, "wake")

    async def close(self) -> None:
        """Stop the thread and wait for its end; requests in flight fail with `StateError`."""
        await asyncio.to_thread(self._receivers.shut_down)
        await asyncio.to_thread(self._halt)
        atexit.unregister(self._halt)
        self._answers.fail_all(StateError(f"replica {self._replica_id} was closed"))
        if self._thread.is_alive():
            raise WaitTimeout("the end of the compute thread", self._replica_id, _JOIN_LIMIT_S)

    def _halt(self) -> None:
        """Let the thread end after the iteration that is running, and wait for that within the limit."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_JOIN_LIMIT_S)

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served, or not now."""
        self._raise_if_dead()
        if not self._accepts:
            why = "it sleeps" if self._sleeping is not None else "no weights committed yet"
            raise StateError(f"replica {self._replica_id} cannot generate: {why}; sync the weights first")
        check_request(request, max_model_len=self._settings.max_model_len, vocab_size=self._shape.vocab_size)
        if request.request_id in self._request_ids:
            raise DataError(f"request id {request.request_id!r} is in flight already; ids must be unique")

    def _post(self, ticket: int, command: Callable[[], None]) -> asyncio.Future[object]:
        """Return a future for what the compute thread will say to `ticket`."""
        future = self._answers.expect(ticket)
        self._send(command)
        return future

    def _send(self, command: Callable[[], None]) -> None:
        """Send `command` together with all others of this tick."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(command)

    def _send_all(self) -> None:
        with self._changed:
            self._inbox.extend(self._unsent)
            self._unsent.clear()
            self._changed.notify()
        if self._error is not None:
            self._answers.fail_all(self._error)

    async def _ask(self, command: Callable[[], None], name: str) -> None:
        """Run `command` on the compute thread; raise what it raises."""
        self._raise_if_dead()
        ticket = self._answers.ticket()

        def run() -> None:
            try:
                command()
            except VerlError as exc:
                self._outbox.append((ticket, exc))
            else:
                self._outbox.append((ticket, None))

        await self._bounded(self._post(ticket, run), name, Deadline.after(self._clock, _CONTROL_LIMIT_S))

    def _bounded(self, answer: asyncio.Future[object], subject: str, deadline: Deadline) -> Awaitable[object]:
        return bounded(answer, subject=subject, holder=self._replica_id, deadline=deadline, clock=self._clock)

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise StateError(f"replica {self._replica_id} was closed")

    def _state(self) -> ReplicaState:
        if self._error is not None or self._closing:
            return DEAD
        if self._sleeping is not None:
            return ASLEEP
        if self._decoder.version is None:
            return INVALID
        return SERVING if self._gate == "open" else PAUSED

    def _require_update(self) -> None:
        if self._update == "none":
            raise StateError(f"replica {self._replica_id} expects no weights; call begin_update first")

    def _set_loaded(self, complete: bool) -> None:
        self._update = "loaded" if complete else "begun"

    def _run(self) -> None:
        try:
            if self._settings.deterministic:
                torch.set_num_threads(1)
            with torch.inference_mode():
                while not self._closing:
                    for command in self._take():
                        command()
                    works, begun = self._has_work(), time.perf_counter()
                    self._iterate()
                    if works:
                        self._busy_s += time.perf_counter() - begun
                    self._flush()
        except Exception as exc:
            self._die(exc)

    def _take(self) -> list[Callable[[], None]]:
        """Return the commands that came in; wait for one while there is nothing to decode."""
        with self._changed:
            if not self._inbox and not self._closing and not self._has_work():
                self._changed.wait(_IDLE_S)
            commands, self._inbox = self._inbox, []
        return commands

    def _has_work(self) -> bool:
        return self._gate != "closed" and bool(self._decoder.active or (self._gate == "open" and self._decoder.waiting))

    def _iterate(self) -> None:
        if self._gate == "open":
            self._give(self._decoder.admit())
        if self._gate != "closed" and self._decoder.active:
            self._give(self._decoder.step())
        if self._gate == "draining" and not self._decoder.active:
            self._shut()

    def _flush(self) -> None:
        """Hand all answers to the loop at once."""
        if self._outbox:
            answers, self._outbox = self._outbox, []
            self._answers.deliver_soon(answers)

    def _die(self, exc: Exception) -> None:
        _log.error("replica %s died: %s: %s", self._replica_id, type(exc).__name__, exc)
        with self._changed:
            self._error = exc
        self._flush()
        self._answers.fail_all_soon(exc)

    def _give(self, results: list[Result]) -> None:
        self._outbox.extend((result.job.ticket, result.value) for result in results)

    def _submit(self, job: Job) -> None:
        if self._gate == "open" and self._decoder.version is None:
            self._outbox.append((job.ticket, self._invalid()))
        else:
            self._decoder.submit(job)

    def _drop(self, job: Job) -> None:
        self._decoder.abort(lambda other: other is job, reason="given up by its caller")

    def _pause(self, mode: PauseMode, ticket: int) -> None:
        self._pausers.append(ticket)
        if mode == "abort":
            self._give(self._decoder.abort(lambda _: True, reason="paused", queued=False))
        if mode == "keep" or not self._decoder.active or self._gate == "closed":
            self._shut()
        else:
            self._gate = "draining"

    def _shut(self) -> None:
        self._gate = "closed"
        self._outbox.extend((ticket, None) for ticket in self._pausers)
        self._pausers.clear()

    def _resume(self) -> None:
        if self._sleeping is not None:
            raise StateError(f"replica {self._replica_id} is asleep; wake it and sync the weights before it resumes")
        with self._changed:
            self._update = "none"
            self._gate = "open"
            self._accepts = self._decoder.version is not None
        if not self._accepts:
            self._give(self._decoder.abort(lambda _: True, reason="weights were lost", queued=False))
            self._outbox.extend((job.ticket, self._invalid()) for job in self._decoder.waiting)
            self._decoder.waiting.clear()
        early = StateError(f"replica {self._replica_id} was resumed before the pause had taken effect")
        self._outbox.extend((ticket, early) for ticket in self._pausers)
        self._pausers.clear()

    def _invalid(self) -> StateError:
        return StateError(f"replica {self._replica_id} holds no committed weights; sync the weights first")

    def _commit(self, version: int, *, keep_cache: bool) -> None:
        if self._update != "loaded":
            raise not_loaded(self._replica_id, version, begun=self._update != "none")
        self._decoder.commit(version, keep_cache=keep_cache)
        self._update = "none"
        self._accepts = True

    def _sleep(self) -> None:
        if self._sleeping is not None:
            return
        if self._gate != "closed" or self._update != "none":
            doing = "in an update" if self._update != "none" else str(self._state())
            raise StateError(f"replica {self._replica_id} is {doing}; only a paused replica may sleep")
        self._give(self._decoder.abort(lambda _: True, reason="sleep", queued=False))
        self._accepts = False
        self._decoder.version = None
        self._decoder.release()
        self._sleeping = release(self._model)

    def _wake(self) -> None:
        if self._sleeping is None:
            return
        allocate(self._model, self._sleeping)
        self._decoder.allocate()
        self._sleeping = None


if TYPE_CHECKING:

    def _is_engine(x: TorchEngine) -> Engine:
        return x
