"""Three managers as somebody else's repository would write them: they know the contracts and nothing else.

Each wraps the default implementation, which is found by entry point, and leaves a trace in the event log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from verl_contracts.agents import AgentLoopManager
from verl_contracts.clock import Clock, Deadline
from verl_contracts.events import EventSink
from verl_contracts.rollout import LLMServerManager
from verl_contracts.samples import GroupRequest, GroupResult
from verl_contracts.weights import CheckpointEngineManager, SyncReport
from verl_contracts.wrappers import WrappedAgentLoopManager, WrappedCheckpointManager, WrappedServerManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Options of all three."""

    label: str = "outside"


class OutsideServerManager(WrappedServerManager):
    """Says when replicas are let in."""

    Config: ClassVar[type] = Label

    def __init__(self, inner: LLMServerManager, *, config: Label, clock: Clock, events: EventSink) -> None:
        super().__init__(inner, config=config, clock=clock, events=events)
        self._label = config.label

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        self.events.emit("outside.admit", {"label": self._label, "replicas": list(replica_ids)})
        await super().admit(replica_ids)


class OutsideCheckpointManager(WrappedCheckpointManager):
    """Counts the bytes that it moved."""

    Config: ClassVar[type] = Label

    def __init__(self, inner: CheckpointEngineManager, *, config: Label, clock: Clock, events: EventSink) -> None:
        super().__init__(inner, config=config, clock=clock, events=events)
        self._label = config.label
        self._moved = 0

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        report = await super().update_weights(version, deadline=deadline)
        self._moved += report.num_bytes
        self.events.emit("outside.sync", {"label": self._label, "version": version, "moved": self._moved})
        return report


class OutsideAgentLoopManager(WrappedAgentLoopManager):
    """Says which groups it played."""

    Config: ClassVar[type] = Label

    def __init__(self, inner: AgentLoopManager, *, config: Label, clock: Clock, events: EventSink) -> None:
        super().__init__(inner, config=config, clock=clock, events=events)
        self._label = config.label

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        result = await super().run_group(request, deadline=deadline)
        self.events.emit("outside.group", {"label": self._label, "uid": str(request.uid)})
        return result
