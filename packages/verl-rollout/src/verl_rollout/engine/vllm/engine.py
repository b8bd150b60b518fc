"""vLLM behind the `Engine` face: who may generate now, with which weights, and what a death leaves.

Owns the gate in front of vLLM (open, closed), whether its weights are committed, and the requests in flight. A request
that comes while the gate is closed waits here and not in vLLM, so that it begins under the weights it is told it has.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from verl_contracts.clock import Deadline
from verl_contracts.errors import DataError, StateError
from verl_contracts.rollout import ASLEEP, DEAD, INVALID, KEEP, LORA, OPENAI, PAUSED, SERVING, SLEEP, ReplicaStatus
from verl_contracts.waits import bounded
from verl_rollout.engine.requests import check_request
from verl_rollout.engine.vllm.adapters import Adapters, TakesAdapters
from verl_rollout.engine.vllm.answers import Spans, aborted, completed
from verl_rollout.engine.vllm.arguments import engine_arguments
from verl_rollout.engine.vllm.builds import check_installed, on_cpu
from verl_rollout.engine.vllm.causes import Causes
from verl_rollout.engine.vllm.flights import (
    BusyTime,
    Condition,
    InFlight,
    PromptCount,
    sampling_parameters,
    tells_versions,
)
from verl_rollout.engine.vllm.life import Life
from verl_rollout.engine.vllm.openai_server import OpenAIServer
from verl_rollout.engine.vllm.options import VLLMOptions, read_options
from verl_rollout.engine.vllm.receivers import VLLMReceiverHost

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import (
        Capability,
        ChecksSettings,
        OpenAIEndpoint,
        PauseMode,
        ReplicaState,
        RolloutSettings,
        SupportsOpenAI,
    )
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import WeightReceiverHost
    from verl_rollout.engine.base import Engine

__all__ = ["VLLMEngine"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_CONTROL_LIMIT_S = 60.0
"""Longest that a control call may wait for the iteration that is running."""
_CLOSE_LIMIT_S = 30.0


class VLLMEngine(TakesAdapters):
    """One `AsyncLLM`, see `verl_rollout.engine.base.Engine`."""

    Config: ClassVar[type] = VLLMOptions

    def __init__(
        self,
        llm: AsyncLLM,
        settings: RolloutSettings,
        options: VLLMOptions,
        *,
        causes: Causes,
        replica_id: str,
        clock: Clock,
    ) -> None:
        """Use `create`."""
        self._llm = llm
        self._life = Life(llm, causes, replica_id=replica_id, died=self._fail_waiting)
        self._settings = settings
        self._options = options
        self._replica_id = replica_id
        self._clock = clock
        self._vocab_size = llm.model_config.get_vocab_size()
        self._flying: dict[str, InFlight] = {}
        self._tokens = 0
        self._prompts = PromptCount()
        self._busy = BusyTime()
        self._now = Condition()
        self._adapters = Adapters(llm, settings, options, replica_id=replica_id, life=self._life)
        self._receivers = VLLMReceiverHost(
            llm,
            settings,
            replica_id=replica_id,
            workers=settings.devices_per_replica,
            clock=clock,
            begin=self._begin_update,
            restore=self._adapters.restore,
            committed=self._committed,
        )
        self._openai = OpenAIServer(
            llm, settings, options, replica_id=replica_id, clock=clock, relay=self._relay, status=self.status
        )

    @classmethod
    def check(cls, settings: RolloutSettings, /) -> None:
        """Refuse options that are wrong and a vLLM that is missing or too old; imports none of it."""
        options = read_options(settings.engine_options)
        check_installed()
        engine_arguments(settings, options, rank=0)

    @classmethod
    def create(cls, settings: RolloutSettings, /, *, replica_id: str, rank: int, clock: Clock) -> Self:
        """Start vLLM's processes; the weights are whatever was in memory."""
        from verl_rollout.engine.vllm.starting import start

        cls.check(settings)
        options = read_options(settings.engine_options)
        causes = Causes()
        llm = start(settings, options, rank=rank, causes=causes)
        return cls(llm, settings, options, causes=causes, replica_id=replica_id, clock=clock)

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence; see `Engine.generate`."""
        self._check(request)
        with self._flight(request.request_id) as flight:
            return await self._in_time(self._generate(request, flight), f"request {request.request_id!r}", deadline)

    async def abort(self, request_ids: Sequence[str] | None, /, *, reason: str) -> None:
        """Cut these requests, or all."""
        self._life.check()
        chosen = list(self._flying) if request_ids is None else [name for name in request_ids if name in self._flying]
        for name in chosen:
            flight = self._flying[name]
            flight.reason = flight.reason or reason
            if not flight.admitted.done():
                flight.admitted.set_result(None)
        inside = [name for name in chosen if self._flying[name].given]
        if inside:
            await self._control(self._llm.abort(inside), "abort")

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Return once nothing is decoded."""
        self._life.check()
        if mode == "keep" and KEEP not in self.capabilities:
            raise StateError(f"replica {self._replica_id} cannot keep: its vLLM does not tell which tokens came later")
        self._now.open = False
        if mode == "abort":
            for flight in self._flying.values():
                if flight.given:
                    flight.reason = flight.reason or "paused"
        try:
            pausing = self._life.watch(self._llm.pause_generation(mode=mode, clear_cache=False))
            await self._in_time(pausing, f"pause ({mode})", deadline)
        finally:
            self._busy.set(self._computes())
        if self._now.open:
            raise StateError(f"replica {self._replica_id} was resumed before the pause had taken effect")
        self._now.quiet = True
        self._busy.set(False)

    async def resume(self) -> None:
        """Decode again, unless invalid; then what waited is refused and what was frozen comes back aborted."""
        self._life.check()
        now = self._now
        if now.asleep:
            raise StateError(f"replica {self._replica_id} is asleep; wake it and sync the weights before it resumes")
        now.accepts = now.updates.version is not None
        if now.accepts:
            if now.cache_asleep:
                await self._control(self._llm.wake_up(["kv_cache"]), "wake")
                now.cache_asleep = False
            await self._control(self._llm.resume_generation(), "resume")
        now.open, now.quiet = True, False
        for flight in self._flying.values():
            if not flight.admitted.done():
                flight.admitted.set_result(None)
        if not now.accepts:
            await self.abort(
                [name for name, flight in self._flying.items() if flight.given], reason="weights were lost"
            )
        self._busy.set(self._computes())

    def status(self) -> ReplicaStatus:
        """Return the present status, at once."""
        running = min(len(self._inside()), self._settings.max_num_seqs)
        return ReplicaStatus(
            replica=self._replica_id,
            state=self._state(),
            version=self._now.updates.version,
            running=running,
            waiting=len(self._flying) - running,
            generated_tokens=self._tokens,
            busy_s=self._busy.total(),
            prompt_tokens=self._prompts.tokens,
            cached_prompt_tokens=self._prompts.cached,
        )

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What the installed vLLM can do: the CPU build cannot sleep, and older ones do not tell versions apart."""
        can = {SLEEP: not on_cpu(), KEEP: tells_versions(), OPENAI: self._options.openai_server}
        can[LORA] = self._options.max_loras > 0
        return frozenset(name for name, true in can.items() if true)

    async def openai_endpoint(self, *, deadline: Deadline) -> OpenAIEndpoint:
        """Return where this engine answers the OpenAI protocol; see `SupportsOpenAI`."""
        self._life.check()
        if OPENAI not in self.capabilities:
            raise StateError(f"replica {self._replica_id} has no endpoint: set engine_kwargs.openai_server to true")
        return await self._openai.endpoint(deadline=deadline)

    @property
    def receiver_host(self) -> WeightReceiverHost:
        """The receivers inside vLLM's workers."""
        return self._receivers

    async def sleep(self) -> None:
        """Free weights and cache; frozen sequences come back aborted. The CPU build of vLLM cannot."""
        self._life.check()
        now = self._now
        if now.asleep:
            return
        if SLEEP not in self.capabilities:
            raise StateError(f"replica {self._replica_id} cannot sleep: the CPU build of vLLM gives no memory back")
        if not now.quiet:
            raise StateError(f"replica {self._replica_id} is {self._state()}; only a paused replica may sleep")
        await self.abort(self._inside(), reason="sleep")
        now.accepts, now.updates.version = False, None
        await self._control(self._llm.sleep(level=2), "sleep")
        now.asleep = now.cache_asleep = True

    async def wake(self) -> None:
        """Allocate the weights again. The cache follows at `resume`, so that a sync needs less memory."""
        self._life.check()
        if self._now.asleep:
            await self._control(self._llm.wake_up(["weights"]), "wake")
            self._now.asleep = False

    async def close(self) -> None:
        """Stop vLLM's processes; requests in flight fail with `StateError`."""
        if self._life.closing:
            return
        self._life.closing = True
        self._fail_waiting(self._life.end())
        await self._openai.close()
        await self._receivers.shut_down()
        await self._adapters.shut_down()
        await asyncio.to_thread(self._llm.shutdown, _CLOSE_LIMIT_S)

    async def _generate(self, request: GenerationRequest, flight: InFlight) -> Completion | AbortedCompletion:
        from vllm.v1.engine.exceptions import EngineDeadError

        version = await self._admitted(flight, request.min_version)
        spans = Spans(self._now.updates, version)
        cut = flight.reason
        if cut is not None:
            return aborted(None, request, spans, replica=self._replica_id, reason=cut)
        flight.given = True
        self._busy.set(True)
        try:
            # The salt makes the version part of a prefix's identity: none is shared by requests of two versions.
            prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"v{version}"}
            parameters = sampling_parameters(request.sampling, self._options.report_interval)
            with self._adapters.using(request) as lora:
                async for output in self._llm.generate(prompt, parameters, request.request_id, lora_request=lora):
                    self._tokens += flight.read_tokens(output)
                    flight.read_prompt(output)
        except EngineDeadError:
            end = self._life.end()
            part = aborted(flight.last, request, spans, replica=self._replica_id, reason="the engine died")
            if part.token_ids and not self._life.closing:
                return part
            raise end from None
        last = flight.last
        if last is None or last.finish_reason not in ("stop", "length"):
            if flight.reason is None and self._now.open:
                _log.warning("vLLM ended request %s by itself", request.request_id)
            return aborted(last, request, spans, replica=self._replica_id, reason=flight.reason or "ended by vLLM")
        return completed(last, request, spans, replica=self._replica_id)

    async def _relay(
        self, name: str, ask: Callable[[int], AsyncGenerator[RequestOutput]], /, *, deadline: Deadline
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Let a request through that our OpenAI server makes; see `Relay`."""
        self._raise_if_not_accepting()
        with self._flight(name) as flight:
            version = await self._in_time(self._admitted(flight, 0), f"request {name!r}", deadline)
            if flight.reason is not None:
                raise StateError(f"replica {self._replica_id} cut it before it began: {flight.reason}")
            flight.given = True
            self._busy.set(True)
            async with aclosing(ask(version)) as outputs:
                subject = f"request {name!r}"
                while output := await self._in_time(self._life.watch(anext(outputs, None)), subject, deadline):
                    self._tokens += sum(len(part.token_ids) for part in output.outputs)
                    flight.read_prompt(output)
                    yield version, output

    @contextmanager
    def _flight(self, name: str) -> Iterator[InFlight]:
        """Count a request as in flight; it is admitted when the gate is open."""
        flight = self._flying[name] = InFlight(admitted=asyncio.get_running_loop().create_future())
        if self._now.open:
            flight.admitted.set_result(None)
        try:
            yield flight
        finally:
            del self._flying[name]
            self._prompts.add(flight)
            self._busy.set(self._computes())

    async def _admitted(self, flight: InFlight, min_version: int) -> int:
        """Return the version under which it begins, once the gate is open."""
        await flight.admitted  # wait: the callers bound it
        version = self._now.updates.version
        if version is None or version < min_version:
            raise self._invalid(min_version)
        return version

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what can never be served, or not now."""
        self._raise_if_not_accepting()
        known = self._adapters.known
        check_request(request, max_model_len=self._settings.max_model_len, vocab_size=self._vocab_size, adapters=known)
        if request.request_id in self._flying:
            raise DataError(f"request id {request.request_id!r} is in flight already; ids must be unique")

    def _raise_if_not_accepting(self) -> None:
        self._life.check()
        if not self._now.accepts:
            why = "it sleeps" if self._now.asleep else "no weights committed yet"
            raise StateError(f"replica {self._replica_id} cannot generate: {why}; sync the weights first")

    def _begin_update(self) -> None:
        """Declare the weights invalid, until `_committed`."""
        self._life.check()
        if not self._now.quiet or self._now.asleep:
            raise StateError(f"replica {self._replica_id} is {self._state()}; pause and wake it before an update")
        self._now.updates.version = None

    def _committed(self, version: int, keep_cache: bool) -> None:
        if not self._now.quiet:
            raise StateError(f"replica {self._replica_id} was resumed during the update; pause it and sync again")
        self._now.updates.commit(version, keep_cache=keep_cache)
        self._now.accepts = True

    def _computes(self) -> bool:
        return not self._now.quiet and bool(self._inside())

    def _inside(self) -> list[str]:
        """Return the requests that vLLM has."""
        return [name for name, flight in self._flying.items() if flight.given]

    def _state(self) -> ReplicaState:
        now = self._now
        if self._life.over:
            return DEAD
        if now.asleep:
            return ASLEEP
        if now.updates.version is None:
            return INVALID
        return SERVING if now.open else PAUSED

    def _fail_waiting(self, error: Exception) -> None:
        """Let requests that are not admitted yet fail."""
        for flight in self._flying.values():
            if not flight.admitted.done():
                flight.admitted.set_exception(error)

    def _invalid(self, wanted: int) -> StateError:
        version = self._now.updates.version
        if version is None:
            return StateError(f"replica {self._replica_id} holds no committed weights; sync the weights first")
        return StateError(f"replica {self._replica_id} holds version {version}, and {wanted} is the oldest wanted")

    async def _control(self, call: Awaitable[T], subject: str) -> T:
        return await self._in_time(self._life.watch(call), subject, Deadline.after(self._clock, _CONTROL_LIMIT_S))

    async def _in_time(self, call: Awaitable[T], subject: str, deadline: Deadline) -> T:
        return await bounded(call, subject=subject, holder=self._replica_id, deadline=deadline, clock=self._clock)


if TYPE_CHECKING:

    def _is_engine(x: VLLMEngine) -> Engine:
        return x

    def _supports_openai(x: VLLMEngine) -> SupportsOpenAI:
        return x

    def _checks_settings(x: type[VLLMEngine]) -> type[ChecksSettings]:
        return x
