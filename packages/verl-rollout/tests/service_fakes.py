"""A scripted engine and weight backend, and a world to run replicas in: virtual time, no torch, no processes.

What each replica does is data: `RolloutSettings.model_path` holds a JSON object, replica id → `Script` fields. So the
script travels as settings do, and nothing is global.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.clock import Deadline
from verl_contracts.errors import ConfigError, DataError, StateError, WeightSyncError
from verl_contracts.rollout import (
    ASLEEP,
    DEAD,
    INVALID,
    KEEP,
    LORA,
    OPENAI,
    PAUSED,
    SERVING,
    SLEEP,
    OpenAIEndpoint,
    PauseMode,
    ReplicaState,
    ReplicaStatus,
    RolloutSettings,
)
from verl_contracts.runtime import RuntimeSettings
from verl_contracts.samples import GroupRequest, GroupUid, Prompt
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.virtual import VirtualClock
from verl_contracts.tokens import (
    SAMPLED,
    AbortedCompletion,
    Completion,
    GenerationRequest,
    SampleKey,
    SamplingParams,
    VersionSpan,
)
from verl_contracts.waits import bounded
from verl_contracts.weights import (
    EndpointInfo,
    LoadReport,
    Manifest,
    Plan,
    TopologyPlanner,
    TransferReport,
    WeightReceiver,
    WeightSender,
    WireFormat,
)
from verl_rollout.engine.base import Engine, NoOptions
from verl_rollout.engine.receiving import InProcessReceiverHost
from verl_rollout.engine.requests import check_adapter
from verl_rollout.manager import ReplicaManager
from verl_rollout.replica.actor import ReplicaActor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    import torch

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Capability, Replica
    from verl_contracts.weights import TensorMeta, WeightReceiverHost, WeightSource, WeightTarget

STOP = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one replica's engine does."""

    length: int = 6
    """Tokens of an answer, the stop id included."""
    token_s: float = 0.01
    dies_at: int | None = None
    """Number of the request, from 1, at which the engine dies."""
    raises_at: int | None = None
    """Number of the request, from 1, from which on it raises without dying."""
    misbuilt: bool = False
    """Raises what a wrongly built actor raises."""
    empty: bool = False
    """Answers with nothing."""
    hangs: bool = False
    """Never answers."""
    abort_after: tuple[int, ...] = ()
    """Tokens after which each attempt in turn comes back aborted; later attempts do not."""
    fails_to_start: bool = False
    fails_to_load: bool = False
    speaks_openai: bool = False
    takes_adapters: bool = False


@dataclass(slots=True)
class _Run:
    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    cut: str | None = None


def token(index: int, length: int) -> int:
    """Return the scripted token at a position of an answer of `length`."""
    return STOP if index == length - 1 else 100 + index


def logprob(index: int) -> float:
    """Return the scripted log-prob at a position."""
    return -0.5 - index / 64


class ScriptedEngine:
    """An engine whose answers count: 100, 101, …, `STOP`, whatever the prompt."""

    Config: ClassVar[type] = NoOptions

    def __init__(self, script: Script, settings: RolloutSettings, *, replica_id: str, clock: Clock) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self._id = replica_id
        self._clock = clock
        self._max_model_len = settings.max_model_len
        self._receivers = InProcessReceiverHost(
            self, backend=settings.weight_backend, owner=replica_id, clock=clock, threads=False
        )
        self._runs: dict[str, _Run] = {}
        self._waiting = 0
        self._frozen = 0
        self._generated = 0
        self._version: int | None = None
        self._kv_version: int | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._freezing = False
        self._asleep = False
        self._death: Exception | None = None
        self._adapters: dict[str, str] = {}

    @classmethod
    def create(cls, settings: RolloutSettings, /, *, replica_id: str, rank: int, clock: Clock) -> Self:
        scripts = json.loads(settings.model_path or "{}")
        fields = scripts.get(replica_id, scripts.get("*", {}))
        script = Script(**{**fields, "abort_after": tuple(fields.get("abort_after", ()))})
        if script.fails_to_start:
            raise RuntimeError(f"scripted: {replica_id} does not start")
        return cls(script, settings, replica_id=replica_id, clock=clock)

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        self.requests.append(request)
        number = len(self.requests)
        if self._death is None and self.script.dies_at is not None and number >= self.script.dies_at:
            self._death = RuntimeError("scripted crash")
        if self._death is not None:
            raise self._death
        if self.script.raises_at is not None and number >= self.script.raises_at:
            raise RuntimeError("scripted hiccup")
        if self.script.misbuilt:
            raise ConfigError("scripted: no public method 'generate'")
        if len(request.prompt_ids) + request.sampling.max_tokens > self._max_model_len:
            raise DataError(f"{len(request.prompt_ids)} + {request.sampling.max_tokens} tokens > {self._max_model_len}")
        check_adapter(request, self._adapters if self.script.takes_adapters else None)
        if self._version is None or self._version < request.min_version:
            raise StateError(f"version {self._version} < {request.min_version}")
        if self.script.empty:
            return self._completion(_Run(request), "stop")
        run = _Run(request)
        self._waiting += 1
        try:
            await bounded(self._open.wait(), subject="resume", holder=self._id, deadline=deadline, clock=self._clock)
        finally:
            self._waiting -= 1
        self._runs[request.request_id] = run
        try:
            return await bounded(
                self._decode(run, number), subject="answer", holder=self._id, deadline=deadline, clock=self._clock
            )
        finally:
            del self._runs[request.request_id]

    async def _decode(self, run: _Run, number: int) -> Completion | AbortedCompletion:
        request = run.request
        limit = self.script.abort_after[number - 1] if number <= len(self.script.abort_after) else None
        if limit == 0:
            return self._aborted(run, "scripted")
        for index in range(request.resumed_tokens, request.resumed_tokens + request.sampling.max_tokens):
            await self._clock.sleep(1e9 if self.script.hangs else self.script.token_s)
            self._frozen += 1
            while not self._open.is_set() and run.cut is None and self._freezing:
                await self._clock.sleep(self.script.token_s)
            self._frozen -= 1
            if run.cut is not None:
                return self._aborted(run, run.cut)
            self._add(run, index)
            if limit is not None and len(run.ids) == limit:
                return self._aborted(run, "scripted")
            if run.ids[-1] in request.sampling.stop_token_ids:
                return self._completion(run, "stop")
        return self._completion(run, "length")

    def _add(self, run: _Run, index: int) -> None:
        version, kv_version = self._version or 0, self._kv_version or 0
        at = len(run.ids)
        run.ids.append(token(index, self.script.length))
        self._generated += 1
        last = run.spans[-1] if run.spans else None
        if last is not None and (last.version, last.kv_version) == (version, kv_version):
            run.spans[-1] = replace(last, end=at + 1)
        else:
            run.spans.append(VersionSpan(version=version, kv_version=kv_version, start=at, end=at + 1))

    def _completion(self, run: _Run, finish_reason: str) -> Completion:
        return Completion(
            request_id=run.request.request_id,
            token_ids=tuple(run.ids),
            logprobs=self._logprobs(run),
            spans=tuple(run.spans),
            finish_reason="stop" if finish_reason == "stop" else "length",
            logprob_kind=SAMPLED,
            replica=self._id,
        )

    def _aborted(self, run: _Run, reason: str) -> AbortedCompletion:
        return AbortedCompletion(
            request_id=run.request.request_id,
            token_ids=tuple(run.ids),
            logprobs=self._logprobs(run),
            spans=tuple(run.spans),
            logprob_kind=SAMPLED,
            replica=self._id,
            reason=reason,
        )

    def _logprobs(self, run: _Run) -> tuple[float, ...]:
        return tuple(logprob(run.request.resumed_tokens + offset) for offset in range(len(run.ids)))

    async def abort(self, request_ids: Sequence[str] | None, /, *, reason: str) -> None:
        for request_id in list(self._runs) if request_ids is None else request_ids:
            if request_id in self._runs:
                self._runs[request_id].cut = reason

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        self._open.clear()
        self._freezing = mode == "keep"
        if mode == "abort":
            await self.abort(None, reason="weight sync")
        while len(self._runs) > self._frozen:
            await self._clock.sleep(self.script.token_s / 2)

    async def resume(self) -> None:
        if self._asleep:
            raise StateError("asleep")
        if self._version is not None:
            self._open.set()

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica=self._id,
            state=self._state(),
            version=self._version,
            running=len(self._runs),
            waiting=self._waiting,
            generated_tokens=self._generated,
        )

    def _state(self) -> ReplicaState:
        if self._death is not None:
            return DEAD
        if self._asleep:
            return ASLEEP
        if self._version is None:
            return INVALID
        return SERVING if self._open.is_set() else PAUSED

    @property
    def capabilities(self) -> frozenset[Capability]:
        more = {OPENAI: self.script.speaks_openai, LORA: self.script.takes_adapters}
        return frozenset({SLEEP, KEEP, *(name for name, true in more.items() if true)})

    async def openai_endpoint(self, *, deadline: Deadline) -> OpenAIEndpoint:
        return OpenAIEndpoint(base_url=f"http://{self._id}/v1", api_key="key", model="scripted")

    async def load_adapter(self, name: str, /, *, folder: str, deadline: Deadline) -> None:
        self._adapters[name] = folder

    async def unload_adapter(self, name: str, /, *, deadline: Deadline) -> None:
        self._adapters.pop(name, None)

    async def adapters(self, *, deadline: Deadline) -> Sequence[str]:
        return list(self._adapters)

    @property
    def receiver_host(self) -> WeightReceiverHost:
        return self._receivers

    def target(self) -> WeightTarget:
        return ScriptedTarget(fails=self.script.fails_to_load)

    def check_manifest(self, manifest: Manifest, /) -> None:
        if manifest.tensors:
            raise WeightSyncError("prepare", f"scripted: it has no {manifest.tensors[0].name}")

    def begin_update(self) -> None:
        if self._asleep or self._open.is_set():
            raise StateError("only a paused engine that is awake can be updated")
        self._version = None

    async def commit(self, version: int, /, *, keep_cache: bool) -> None:
        self._version = version
        if not keep_cache or self._kv_version is None:
            self._kv_version = version

    async def sleep(self) -> None:
        if self._open.is_set() and not self._asleep:
            raise StateError("only a paused engine may sleep")
        self._asleep, self._version = True, None

    async def wake(self) -> None:
        self._asleep = False

    async def close(self) -> None:
        self._receivers.shut_down()
        self._open.clear()


class ScriptedTarget:
    """Loads nothing, or fails."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        if self._fails:
            raise RuntimeError("scripted: a tensor does not fit")
        return LoadReport(loaded=tuple(meta.name for meta, _ in items))


class ScriptedReceiver:
    """Receives at once whatever the plan says."""

    def __init__(self, *, owner: str, clock: Clock) -> None:
        self._owner = owner

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        return EndpointInfo(owner=self._owner, rank=rank, node="here")

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        target.load(iter(()))
        return TransferReport(owner=self._owner, rank=0, tensors=0, num_bytes=0, seconds=0.0, digests={})

    def abort(self, reason: str, /) -> None:
        pass

    def close(self) -> None:
        pass


class ScriptedSender:
    """Sends nothing."""

    def __init__(self, *, owner: str, rank: int, clock: Clock) -> None:
        self._owner = owner

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        return EndpointInfo(owner=self._owner, rank=0, node="here")

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        return TransferReport(owner=self._owner, rank=0, tensors=0, num_bytes=0, seconds=0.0, digests={})

    def abort(self, reason: str, /) -> None:
        pass

    def close(self) -> None:
        pass


class ScriptedPlanner:
    """Plans what it is given."""

    def plan(
        self,
        manifest: Manifest,
        /,
        *,
        session: str,
        senders: Sequence[EndpointInfo],
        receivers: Sequence[EndpointInfo],
        bucket_bytes: int,
    ) -> Plan:
        return Plan(
            session=session,
            version=manifest.version,
            manifest=manifest,
            senders=tuple(senders),
            receivers=tuple(receivers),
            bucket_bytes=bucket_bytes,
        )


class ScriptedBackend:
    """Moves nothing, at once."""

    sender_class: ClassVar[type[WeightSender]] = ScriptedSender
    receiver_class: ClassVar[type[WeightReceiver]] = ScriptedReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = ScriptedPlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WireFormat(format_id="scripted", version=1),)


if TYPE_CHECKING:

    def _is_engine(x: ScriptedEngine) -> Engine:
        return x


def settings(
    scripts: Mapping[str, Mapping[str, object]] | None = None,
    *,
    num_replicas: int = 2,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    resumable: bool = True,
    request_limit_s: float = 600.0,
    options: Mapping[str, object] | None = None,
) -> RolloutSettings:
    """Return settings of scripted replicas; the script of ``"*"`` is that of all the others."""
    return RolloutSettings(
        model_path=json.dumps(scripts or {}),
        engine="service_fakes:ScriptedEngine",
        weight_backend="service_fakes:ScriptedBackend",
        num_replicas=num_replicas,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        resumable=resumable,
        request_limit_s=request_limit_s,
        options=options or {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a test of services lives in."""

    clock: Clock
    runtime: InProcessRuntime
    events: RecordingEvents

    def within(self, seconds: float) -> Deadline:
        return Deadline.after(self.clock, seconds)

    async def manager(self, chosen: RolloutSettings, *, start_rank: int | None = None) -> ReplicaManager:
        return await ReplicaManager.create(
            chosen,
            runtime=self.runtime,
            grant=None,
            start_rank=start_rank,
            events=self.events,
            deadline=self.within(60.0),
        )

    async def serving(self, chosen: RolloutSettings) -> ReplicaManager:
        """Return a manager whose replicas all have version 0 and were admitted."""
        manager = await self.manager(chosen)
        for replica in manager.replicas():
            await self.sync(replica, 0)
        await manager.admit([replica.replica_id for replica in manager.replicas()])
        return manager

    async def sync(self, replica: Replica, version: int, *, mode: PauseMode = "abort") -> None:
        """Bring one replica to a version, as a checkpoint-engine manager does."""
        host, limit = replica.receiver_host, self.within(60.0)
        manifest = Manifest(version=version, tensors=(), num_bytes=0)
        endpoints = await host.prepare(manifest, session=f"s{version}", deadline=limit)
        await replica.pause(mode, deadline=limit)
        plan = Plan(
            session=f"s{version}",
            version=version,
            manifest=manifest,
            senders=(),
            receivers=tuple(endpoints),
            bucket_bytes=1,
        )
        await host.transfer(plan, deadline=limit)
        await host.commit(version, keep_cache=mode == "keep", deadline=limit)
        await host.close(deadline=limit)
        await replica.resume(deadline=limit)

    def engine(self, replica_id: str) -> ScriptedEngine:
        """Return the engine inside a replica, the latest of that name."""
        role, _, rank = replica_id.rpartition("-")
        targets = [held.target for name, held in self.runtime._actors.items() if f"/{role}/{rank}#" in name]
        assert isinstance(targets[-1], ReplicaActor)
        engine = targets[-1]._engine
        assert isinstance(engine, ScriptedEngine)
        return engine


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Give a runtime in virtual time, and close it."""
    async with world_on(VirtualClock(asyncio.get_running_loop())) as here:
        yield here


@asynccontextmanager
async def world_on(clock: Clock) -> AsyncIterator[World]:
    """Give a runtime on any clock, and close it."""
    events = RecordingEvents(clock)
    runtime = await InProcessRuntime.create(RuntimeSettings(run_id="test"), clock=clock, events=events)
    try:
        yield World(clock=clock, runtime=runtime, events=events)
    finally:
        await runtime.close(deadline=Deadline.after(clock, 60.0))


def request(
    number: int = 0,
    *,
    prompt_ids: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 6,
    resumed_tokens: int = 0,
    min_version: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
        key=SampleKey(uid=f"0-{number}-0", sample=0, turn=0),
        resumed_tokens=resumed_tokens,
        min_version=min_version,
    )


def group(row: int = 0, *, n: int = 4, max_tokens: int = 6) -> GroupRequest:
    return GroupRequest(
        uid=GroupUid(epoch=0, row=row),
        prompt=Prompt(epoch=0, row=row, prompt_ids=(1, 2, 3), ground_truth="x", data_source="toy"),
        n=n,
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
    )
