"""The sending side of a trainer that is one rank of this very process: a notebook, a script, a test.

A trainer of several ranks has hosts of its own, which reach all of them; see `WeightSenderHost`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import (
        EndpointInfo,
        Manifest,
        Plan,
        TransferReport,
        WeightSender,
        WeightSenderHost,
        WeightSource,
    )

__all__ = ["LocalSenderHost"]


class LocalSenderHost:
    """Sends what `source` holds at the time of each transfer, on a thread; `source` may be replaced between syncs."""

    def __init__(self, sender: WeightSender, source: WeightSource, *, clock: Clock) -> None:
        self.source = source
        self._sender = sender
        self._clock = clock

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        """Prepare the one rank."""
        manifest = self.source.manifest(version)
        return manifest, [self._sender.prepare(manifest, session=session)]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Send everything."""
        report = await bounded(
            asyncio.to_thread(self._sender.send, plan, self.source, deadline=deadline),
            subject=f"sending weights version {plan.version}",
            holder="the sender's thread",
            deadline=deadline,
            clock=self._clock,
        )
        return [report]

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer that is under way."""
        self._sender.abort(reason)

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created."""
        self._sender.close()


if TYPE_CHECKING:

    def _is_host(x: LocalSenderHost) -> WeightSenderHost:
        return x
