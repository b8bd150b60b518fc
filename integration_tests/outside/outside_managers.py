"""Three managers as somebody else's repository would write them: they know the contracts and nothing else.

Each delegates to the default implementation, which it finds by entry point, and leaves a trace in the event log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from verl_contracts.agents import AgentLoopManager, AgentSettings
from verl_contracts.clock import Clock, Deadline
from verl_contracts.events import EventSink
from verl_contracts.plugins import families, load_plugin
from verl_contracts.rollout import LLMClient, LLMServerManager, Replica, RolloutSettings
from verl_contracts.runtime import DeviceGrant, ObjectSpec, Runtime
from verl_contracts.samples import GroupRequest, GroupResult
from verl_contracts.weights import CheckpointEngineManager, CheckpointSettings, SyncReport, WeightSenderHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Options of all three."""

    label: str = "outside"


def _label(options: Mapping[str, object]) -> str:
    return str(options.get("label", "outside"))


class OutsideServerManager:
    """An `LLMServerManager` that says when replicas are let in."""

    Config: ClassVar[type] = Label

    def __init__(self, inner: LLMServerManager, events: EventSink, label: str) -> None:
        self._inner = inner
        self._events = events
        self._label = label

    @classmethod
    async def create(
        cls,
        settings: RolloutSettings,
        /,
        *,
        runtime: Runtime,
        grant: DeviceGrant | None,
        start_rank: int | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        default = load_plugin(families.LLM_SERVER_MANAGER, "default", key="outside")
        inner = await default.create(
            replace(settings, options={}),
            runtime=runtime,
            grant=grant,
            start_rank=start_rank,
            events=events,
            deadline=deadline,
        )
        return cls(inner, events, _label(settings.options))

    def replicas(self) -> Sequence[Replica]:
        return self._inner.replicas()

    def client(self) -> LLMClient:
        return self._inner.client()

    def client_spec(self) -> ObjectSpec:
        return self._inner.client_spec()

    def addresses(self) -> Sequence[str]:
        return self._inner.addresses()

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[Replica]:
        return await self._inner.add(count, deadline=deadline)

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        self._events.emit("outside.admit", {"label": self._label, "replicas": list(replica_ids)})
        await self._inner.admit(replica_ids)

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        await self._inner.exclude(replica_ids)

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        await self._inner.remove(replica_ids, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        await self._inner.close(deadline=deadline)


class OutsideCheckpointManager:
    """A `CheckpointEngineManager` that counts the bytes that it moved."""

    Config: ClassVar[type] = Label

    def __init__(self, inner: CheckpointEngineManager, events: EventSink, label: str) -> None:
        self._inner = inner
        self._events = events
        self._label = label
        self._moved = 0

    @classmethod
    async def create(
        cls,
        settings: CheckpointSettings,
        /,
        *,
        sender: WeightSenderHost,
        replicas: Sequence[Replica],
        clock: Clock,
        events: EventSink,
    ) -> Self:
        default = load_plugin(families.CHECKPOINT_MANAGER, "default", key="outside")
        inner = await default.create(
            replace(settings, options={}), sender=sender, replicas=replicas, clock=clock, events=events
        )
        return cls(inner, events, _label(settings.options))

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        report = await self._inner.update_weights(version, deadline=deadline)
        self._moved += report.num_bytes
        self._events.emit("outside.sync", {"label": self._label, "version": version, "moved": self._moved})
        return report

    def versions(self) -> Mapping[str, int | None]:
        return self._inner.versions()

    async def sleep(self, *, deadline: Deadline) -> None:
        await self._inner.sleep(deadline=deadline)

    async def wake(self, *, deadline: Deadline) -> None:
        await self._inner.wake(deadline=deadline)

    async def add(self, replica: Replica, /) -> None:
        await self._inner.add(replica)

    async def remove(self, replica_id: str, /) -> None:
        await self._inner.remove(replica_id)

    async def close(self, *, deadline: Deadline) -> None:
        await self._inner.close(deadline=deadline)


class OutsideAgentLoopManager:
    """An `AgentLoopManager` that says which groups it played."""

    Config: ClassVar[type] = Label

    def __init__(self, inner: AgentLoopManager, events: EventSink, label: str) -> None:
        self._inner = inner
        self._events = events
        self._label = label

    @classmethod
    async def create(
        cls,
        settings: AgentSettings,
        /,
        *,
        runtime: Runtime,
        client: ObjectSpec,
        reward: ObjectSpec | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        default = load_plugin(families.AGENT_LOOP_MANAGER, "default", key="outside")
        inner = await default.create(
            replace(settings, options={}),
            runtime=runtime,
            client=client,
            reward=reward,
            events=events,
            deadline=deadline,
        )
        return cls(inner, events, _label(settings.options))

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        result = await self._inner.run_group(request, deadline=deadline)
        self._events.emit("outside.group", {"label": self._label, "uid": str(request.uid)})
        return result

    async def close(self, *, deadline: Deadline) -> None:
        await self._inner.close(deadline=deadline)
