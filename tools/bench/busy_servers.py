"""An `LLMServerManager` that notes, after each weight sync, how long its replicas have computed so far.

It is named by class path like any outside manager, delegates to the default one, and asks in the background.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.clock import Deadline
from verl_contracts.plugins import families, load_plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import LLMClient, LLMServerManager, Replica, RolloutSettings
    from verl_contracts.runtime import DeviceGrant, ObjectSpec, Runtime

__all__ = ["BusyServers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyConfig:
    """No options."""


class BusyServers:
    """The default manager, and an event ``bench.busy`` after each sync."""

    Config: ClassVar[type] = BusyConfig

    def __init__(self, inner: LLMServerManager, clock: Clock, events: EventSink) -> None:
        self._inner = inner
        self._clock = clock
        self._events = events
        self._task: asyncio.Task[None] | None = None

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
        """Create the default manager."""
        inner = await load_plugin(families.LLM_SERVER_MANAGER, "default", key="bench").create(
            settings, runtime=runtime, grant=grant, start_rank=start_rank, events=events, deadline=deadline
        )
        return cls(inner, runtime.clock, events)

    def replicas(self) -> Sequence[Replica]:
        """Delegate."""
        return self._inner.replicas()

    def client(self) -> LLMClient:
        """Delegate."""
        return self._inner.client()

    def client_spec(self) -> ObjectSpec:
        """Delegate."""
        return self._inner.client_spec()

    def addresses(self) -> Sequence[str]:
        """Delegate."""
        return self._inner.addresses()

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[Replica]:
        """Delegate."""
        return await self._inner.add(count, deadline=deadline)

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        """Delegate, and ask each replica how long it has computed."""
        await self._inner.admit(replica_ids)
        self._task = asyncio.create_task(self._note())

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        """Delegate."""
        await self._inner.exclude(replica_ids)

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        """Delegate."""
        await self._inner.remove(replica_ids, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Delegate."""
        await self._inner.close(deadline=deadline)

    async def _note(self) -> None:
        deadline = Deadline.after(self._clock, 10.0)
        rows = [await replica.status(deadline=deadline) for replica in self._inner.replicas()]
        self._events.emit("bench.busy", {"version": rows[0].version, "busy_s": sum(row.busy_s for row in rows)})


if TYPE_CHECKING:

    def _is_manager(x: BusyServers) -> LLMServerManager:
        return x
