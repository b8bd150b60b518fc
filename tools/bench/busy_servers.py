"""An `LLMServerManager` that notes, after each weight sync, how long its replicas have computed so far.

It is named by class path like any outside manager, wraps the default one, and asks in the background.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline
from verl_contracts.wrappers import WrappedServerManager

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BusyServers"]


class BusyServers(WrappedServerManager):
    """The default manager, and an event ``bench.busy`` after each sync."""

    _task: asyncio.Task[None] | None = None

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        """Let them serve, and ask each replica how long it has computed."""
        await super().admit(replica_ids)
        self._task = asyncio.create_task(self._note())

    async def _note(self) -> None:
        deadline = Deadline.after(self.clock, 10.0)
        rows = [await replica.status(deadline=deadline) for replica in self.replicas()]
        self.events.emit("bench.busy", {"version": rows[0].version, "busy_s": sum(row.busy_s for row in rows)})
