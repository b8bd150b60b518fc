"""Bases for managers that change one thing about another manager and leave the rest to it.

A subclass overrides what it cares about and calls `super()`; its ``create`` makes the wrapped manager first,
the default one unless `wraps` names another. Nothing here knows an implementation: it is found by entry point.

    class LoggedManager(WrappedCheckpointManager):
        async def update_weights(self, version, /, *, deadline):
            report = await super().update_weights(version, deadline=deadline)
            self.events.emit("my.sync", {"version": version, "bytes": report.num_bytes})
            return report
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.plugins import build_config, families, load_plugin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.agents import AgentLoopManager, AgentSettings
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import LLMClient, LLMServerManager, Replica, RolloutSettings
    from verl_contracts.runtime import DeviceGrant, ObjectSpec, Runtime
    from verl_contracts.samples import GroupRequest, GroupResult
    from verl_contracts.weights import CheckpointEngineManager, CheckpointSettings, SyncReport, WeightSenderHost

__all__ = ["NoOptions", "WrappedAgentLoopManager", "WrappedCheckpointManager", "WrappedServerManager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Options of a plug-in that has none."""


class WrappedServerManager:
    """An `LLMServerManager` that delegates everything."""

    Config: ClassVar[type] = NoOptions
    """Options of the subclass. The wrapped manager gets none."""
    wraps: ClassVar[str] = "default"
    """Entry-point name or class path of the wrapped manager."""

    def __init__(self, inner: LLMServerManager, *, config: object, clock: Clock, events: EventSink) -> None:
        """Wrap `inner`. `config` is an instance of `Config`."""
        self.inner = inner
        self.config = config
        self.clock = clock
        self.events = events

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
        """Create the wrapped manager, then the wrapper."""
        family = families.LLM_SERVER_MANAGER
        config: object = build_config(cls.Config, settings.options, key=f"options of {cls.__qualname__}")
        inner = await load_plugin(family, cls.wraps, key=family.key).create(
            replace(settings, options={}),
            runtime=runtime,
            grant=grant,
            start_rank=start_rank,
            events=events,
            deadline=deadline,
        )
        return cls(inner, config=config, clock=runtime.clock, events=events)

    def replicas(self) -> Sequence[Replica]:
        """Return the replicas in order of rank."""
        return self.inner.replicas()

    def client(self) -> LLMClient:
        """Return a client for the driver."""
        return self.inner.client()

    def client_spec(self) -> ObjectSpec:
        """Return how to build a client elsewhere."""
        return self.inner.client_spec()

    def addresses(self) -> Sequence[str]:
        """Return where replicas listen."""
        return self.inner.addresses()

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[Replica]:
        """Start further replicas."""
        return await self.inner.add(count, deadline=deadline)

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        """Let these replicas serve."""
        await self.inner.admit(replica_ids)

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        """Let these replicas serve no more."""
        await self.inner.exclude(replica_ids)

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        """Drain and stop these replicas."""
        await self.inner.remove(replica_ids, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Stop everything."""
        await self.inner.close(deadline=deadline)


class WrappedCheckpointManager:
    """A `CheckpointEngineManager` that delegates everything."""

    Config: ClassVar[type] = NoOptions
    """Options of the subclass. The wrapped manager gets none."""
    wraps: ClassVar[str] = "default"
    """Entry-point name or class path of the wrapped manager."""

    def __init__(self, inner: CheckpointEngineManager, *, config: object, clock: Clock, events: EventSink) -> None:
        """Wrap `inner`. `config` is an instance of `Config`."""
        self.inner = inner
        self.config = config
        self.clock = clock
        self.events = events

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
        """Create the wrapped manager, then the wrapper."""
        family = families.CHECKPOINT_MANAGER
        config: object = build_config(cls.Config, settings.options, key=f"options of {cls.__qualname__}")
        inner = await load_plugin(family, cls.wraps, key=family.key).create(
            replace(settings, options={}), sender=sender, replicas=replicas, clock=clock, events=events
        )
        return cls(inner, config=config, clock=clock, events=events)

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        """Bring every replica that is awake to `version`."""
        return await self.inner.update_weights(version, deadline=deadline)

    def versions(self) -> Mapping[str, int | None]:
        """Return replica id → committed version."""
        return self.inner.versions()

    async def sleep(self, *, deadline: Deadline) -> None:
        """Put replicas to sleep."""
        await self.inner.sleep(deadline=deadline)

    async def wake(self, *, deadline: Deadline) -> None:
        """Wake those that sleep."""
        await self.inner.wake(deadline=deadline)

    async def add(self, replica: Replica, /) -> None:
        """Include `replica` from the next sync on."""
        await self.inner.add(replica)

    async def remove(self, replica_id: str, /) -> None:
        """Forget a replica."""
        await self.inner.remove(replica_id)

    async def close(self, *, deadline: Deadline) -> None:
        """End a sync that is under way."""
        await self.inner.close(deadline=deadline)


class WrappedAgentLoopManager:
    """An `AgentLoopManager` that delegates everything."""

    Config: ClassVar[type] = NoOptions
    """Options of the subclass. The wrapped manager gets none."""
    wraps: ClassVar[str] = "default"
    """Entry-point name or class path of the wrapped manager."""

    def __init__(self, inner: AgentLoopManager, *, config: object, clock: Clock, events: EventSink) -> None:
        """Wrap `inner`. `config` is an instance of `Config`."""
        self.inner = inner
        self.config = config
        self.clock = clock
        self.events = events

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
        """Create the wrapped manager, then the wrapper."""
        family = families.AGENT_LOOP_MANAGER
        config: object = build_config(cls.Config, settings.options, key=f"options of {cls.__qualname__}")
        inner = await load_plugin(family, cls.wraps, key=family.key).create(
            replace(settings, options={}),
            runtime=runtime,
            client=client,
            reward=reward,
            events=events,
            deadline=deadline,
        )
        return cls(inner, config=config, clock=runtime.clock, events=events)

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        """Play a group."""
        return await self.inner.run_group(request, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the workers."""
        await self.inner.close(deadline=deadline)


if TYPE_CHECKING:

    def _is_server_manager(x: WrappedServerManager) -> LLMServerManager:
        return x

    def _is_checkpoint_manager(x: WrappedCheckpointManager) -> CheckpointEngineManager:
        return x

    def _is_agent_manager(x: WrappedAgentLoopManager) -> AgentLoopManager:
        return x
