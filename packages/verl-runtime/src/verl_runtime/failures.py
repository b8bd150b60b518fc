"""The driver's end of the failure channel: any thread reports, one reader watches.

Owns the order and the once-ness of failures. A failure that nobody reads is kept, never lost silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.failures import FailureRecord, FailureSink

__all__ = ["FailureChannel"]

_log = logging.getLogger(__name__)
_ROOM = 1000
_NAP_S = 60.0


class FailureChannel:
    """A queue of failure records that never blocks its writers. Made on the event loop that will read it."""

    def __init__(self) -> None:
        self._records: deque[FailureRecord] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def report(self, record: FailureRecord, /) -> None:
        """Take a record, from any thread."""
        if len(self._records) >= _ROOM:
            _log.error("failure channel is full, nobody reads it; only logged: %s", record)
            return
        self._records.append(record)
        self._wake()

    def close(self) -> None:
        """End the reader once it has read everything."""
        self._closed = True
        self._wake()

    async def take(self, limit_s: float) -> list[FailureRecord]:
        """Return all records there are; wait for the first at most `limit_s`, or until `close`."""
        if not self._records and not self._closed:
            self._changed.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
        taken = list(self._records)
        self._records.clear()
        return taken

    async def watch(self) -> AsyncIterator[FailureRecord]:
        """Yield each record once, oldest first, until `close` and all are read."""
        while self._records or not self._closed:
            for record in await self.take(_NAP_S):
                yield record

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            _log.debug("failure channel: the driver's event loop is closed")


if TYPE_CHECKING:

    def _is_sink(x: FailureChannel) -> FailureSink:
        return x
