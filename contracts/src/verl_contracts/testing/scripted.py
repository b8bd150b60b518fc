"""A replica without a model: it answers from a script, token by token on its clock, and fails when told to.

For tests of balancers, clients, managers and loops. `ReplicaSuite` certifies it, so what holds with it holds with any
replica that passes. Its weights are versions only; `ScriptedSenderHost` is the sender that fits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import ActorFailed, DataError, StateError
from verl_contracts.failures import FailureRecord
from verl_contracts.rollout import ASLEEP, DEAD, INVALID, KEEP, LORA, PAUSED, SERVING, SLEEP, ReplicaStatus
from verl_contracts.testing.scripted_hosts import ScriptedReceiverHost
from verl_contracts.tokens import SAMPLED, AbortedCompletion, Completion, VersionSpan
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import Capability, PauseMode, Replica, ReplicaState, SupportsLora, SupportsSleep
    from verl_contracts.tokens import GenerationRequest

__all__ = ["Script", "ScriptedReplica", "default_answer"]


def default_answer(prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return 3 to 7 ids that depend on the prompt only."""
    seed = sum(prompt_ids)
    return tuple((seed + 7 * i) % 50 + 1 for i in range(3 + seed % 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How a `ScriptedReplica` behaves."""

    answer: Callable[[tuple[int, ...]], tuple[int, ...]] = default_answer
    """Prompt → the whole answer. A longer one than `max_tokens` is cut and ends by length."""
    seconds_per_token: float = 0.01
    failures: Mapping[int, Exception] = field(default_factory=dict)
    """Number of a request, from 1 → what it raises."""
    dies_at: int | None = None
    """Number of the request with which the replica dies; None when it lives."""


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    kv_version: int
    tokens: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedReplica:
    """A `Replica` that `SupportsSleep` and `SupportsLora`; its adapters are names that change no answer."""

    def __init__(self, replica_id: str, *, clock: Clock, capacity: int = 4, script: Script | None = None) -> None:
        self._id = replica_id
        self._clock = clock
        self._capacity = capacity
        self._script = script or Script()
        self._host = ScriptedReceiverHost(self, clock)
        self._version: int | None = None
        self._paused: PauseMode | None = None
        self._asleep = False
        self._dead: FailureRecord | None = None
        self._running: dict[str, _Running] = {}
        self._waiting = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._changed = asyncio.Event()
        self._adapters: dict[str, Path] = {}
        self.requests: list[GenerationRequest] = []
        """Every request that arrived, in order."""

    @property
    def replica_id(self) -> str:
        """The id it was made with."""
        return self._id

    @property
    def capacity(self) -> int:
        """Sequences at once."""
        return self._capacity

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Sleeping, keeping and adapters."""
        return frozenset({SLEEP, KEEP, LORA})

    @property
    def receiver_host(self) -> ScriptedReceiverHost:
        """Its receivers; `faults` of it are for tests."""
        return self._host

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Answer from the script."""
        self.requests.append(request)
        number = len(self.requests)
        if self._script.dies_at is not None and number >= self._script.dies_at:
            self.die("scripted death")
        self._check_alive()
        if number in self._script.failures:
            raise self._script.failures[number]
        self._check_servable(request)
        self._check_adapter(request)
        return await bounded(
            self._serve(request),
            subject=f"request {request.request_id}",
            holder=self._id,
            deadline=deadline,
            clock=self._clock,
        )

    async def _serve(self, request: GenerationRequest) -> Completion | AbortedCompletion:
        self._waiting += 1
        try:
            await self._until(lambda: self._paused is None and len(self._running) < self._capacity)
        finally:
            self._waiting -= 1
        self._check_adapter(request)
        running = _Running(request=request, kv_version=self._check_servable(request))
        self._running[request.request_id] = running
        try:
            return await self._decode(running)
        finally:
            del self._running[request.request_id]
            self._prompt_tokens += len(request.prompt_ids)
            self._notify()

    async def _decode(self, running: _Running) -> Completion | AbortedCompletion:
        request = running.request
        original = request.prompt_ids[: len(request.prompt_ids) - request.resumed_tokens]
        answer = self._script.answer(original)[request.resumed_tokens :]
        wanted = answer[: request.sampling.max_tokens]
        while len(running.tokens) < len(wanted):
            await self._until(lambda: running.aborted.is_set() or self._paused != "keep")
            await self._token_time(running)
            if running.aborted.is_set():
                return AbortedCompletion(
                    request_id=request.request_id,
                    token_ids=tuple(running.tokens),
                    logprobs=_logprobs(request, len(running.tokens)),
                    spans=tuple(running.spans),
                    logprob_kind=SAMPLED,
                    replica=self._id,
                    reason="aborted",
                )
            if self._paused != "keep":
                self._append(running, wanted[len(running.tokens)])
        return Completion(
            request_id=request.request_id,
            token_ids=tuple(running.tokens),
            logprobs=_logprobs(request, len(running.tokens)),
            spans=tuple(running.spans),
            finish_reason="stop" if len(wanted) == len(answer) else "length",
            logprob_kind=SAMPLED,
            replica=self._id,
        )

    async def _token_time(self, running: _Running) -> None:
        """Return after the time that one token takes, or as soon as the request is aborted."""
        if self._script.seconds_per_token <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(self._script.seconds_per_token):
                await running.aborted.wait()
        except TimeoutError:  # the token is ready
            self._check_alive()

    def _append(self, running: _Running, token: int) -> None:
        version = self._check_servable(running.request)
        position = len(running.tokens)
        last = running.spans[-1] if running.spans else None
        if last is not None and (last.version, last.kv_version) == (version, running.kv_version):
            running.spans.pop()
            position = last.start
        running.tokens.append(token)
        self._tokens += 1
        running.spans.append(
            VersionSpan(version=version, kv_version=running.kv_version, start=position, end=len(running.tokens))
        )

    async def abort(self, request_ids: Sequence[str] | None, /, *, deadline: Deadline) -> None:
        """Cut running requests."""
        self._check_alive()
        for name, running in self._running.items():
            if request_ids is None or name in request_ids:
                running.aborted.set()
        self._notify()

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Stop decoding; under `keep` running requests stay where they are."""
        self._check_alive()
        self._paused = mode
        if mode == "keep":
            return
        if mode == "abort":
            await self.abort(None, deadline=deadline)
        await bounded(
            self._until(lambda: not self._running),
            subject=f"pause of {self._id}",
            holder=lambda: ", ".join(self._running),
            deadline=deadline,
            clock=self._clock,
        )

    async def resume(self, *, deadline: Deadline) -> None:
        """Go on."""
        self._check_alive()
        if self._asleep:
            raise StateError(f"{self._id} is asleep: wake it first")
        self._paused = None
        self._notify()

    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        """Return the present status."""
        return ReplicaStatus(
            replica=self._id,
            state=self._state(),
            version=self._version,
            running=len(self._running),
            waiting=self._waiting,
            generated_tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
        )

    def _state(self) -> ReplicaState:
        if self._dead is not None:
            return DEAD
        if self._asleep:
            return ASLEEP
        if self._version is None:
            return INVALID
        return PAUSED if self._paused is not None else SERVING

    async def sleep(self, *, deadline: Deadline) -> None:
        """Forget the weights."""
        self._check_alive()
        if self._asleep:
            return
        if self._paused is None:
            raise StateError(f"{self._id} decodes: pause it before it sleeps")
        self._asleep = True
        self._version = None

    async def wake(self, *, deadline: Deadline) -> None:
        """Be awake, without weights."""
        self._check_alive()
        self._asleep = False

    async def load_adapter(self, name: str, /, *, folder: str, deadline: Deadline) -> None:
        """Know a name, if its folder holds an adapter."""
        self._check_alive()
        path = _adapter_in(folder)
        if self._asleep:
            raise StateError(f"{self._id} is asleep: wake it first")
        if self._adapters.setdefault(name, path) != path:
            raise StateError(f"{self._id} has {name!r} from {self._adapters[name]}: unload that first")

    async def unload_adapter(self, name: str, /, *, deadline: Deadline) -> None:
        """Forget a name, when nothing runs with it."""
        self._check_alive()
        path = self._adapters.pop(name, None)
        if path is None:
            return
        try:
            await bounded(
                self._until(lambda: all(running.request.adapter != name for running in self._running.values())),
                subject=f"the end of requests with adapter {name}",
                holder=lambda: ", ".join(self._running),
                deadline=deadline,
                clock=self._clock,
            )
        except BaseException:
            self._adapters.setdefault(name, path)
            raise

    async def adapters(self, *, deadline: Deadline) -> Sequence[str]:
        """Return the names."""
        self._check_alive()
        return tuple(self._adapters)

    def die(self, cause: str) -> None:
        """Be dead from now on: every call raises `ActorFailed`, those under way too."""
        if self._dead is None:
            self._dead = FailureRecord(role="replica", rank=0, node="localhost", cause=f"{self._id}: {cause}")
            self._notify()

    def invalidate(self) -> None:
        """Hold mixed weights, as after the start of a transfer."""
        self._check_alive()
        self._version = None

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """Hold the weights of `version`."""
        self._check_alive()
        self._version = version
        if not keep_cache:
            for running in self._running.values():
                running.kv_version = version

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise ActorFailed(self._dead)

    def _check_servable(self, request: GenerationRequest) -> int:
        self._check_alive()
        if self._version is None:
            raise StateError(f"{self._id} holds no committed weights: sync it first")
        if self._version < request.min_version:
            raise StateError(f"{self._id} holds version {self._version}, the request wants {request.min_version}")
        return self._version

    def _check_adapter(self, request: GenerationRequest) -> None:
        if request.adapter is not None and request.adapter not in self._adapters:
            raise DataError(f"{self._id} has no adapter {request.adapter!r}: load it first")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Callers bound it."""
        while not condition():
            self._check_alive()
            await self._changed.wait()  # wait: bounded by every caller
        self._check_alive()


def _adapter_in(folder: str) -> Path:
    path = Path(folder).resolve()
    if not (path / "adapter_config.json").is_file():
        raise DataError(f"there is no adapter in {folder}")
    return path


def _logprobs(request: GenerationRequest, count: int) -> tuple[float, ...]:
    return tuple(-0.1 - 0.01 * (request.resumed_tokens + position) for position in range(count))


if TYPE_CHECKING:

    def _is_replica(x: ScriptedReplica) -> Replica:
        return x

    def _sleeps(x: ScriptedReplica) -> SupportsSleep:
        return x

    def _adapts(x: ScriptedReplica) -> SupportsLora:
        return x
