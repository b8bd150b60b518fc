"""What callers on an event loop wait for, and how a compute thread answers them: all at once, in one wake-up."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from verl_contracts.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Answers"]


class Answers:
    """Futures of one event loop, each found by its ticket."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets = itertools.count()
        self._futures: dict[int, asyncio.Future[object]] = {}

    def ticket(self) -> int:
        """Return a number that nobody else has."""
        return next(self._tickets)

    def expect(self, ticket: int) -> asyncio.Future[object]:
        """Return a future for the answer to `ticket`. Raises `StateError` while another loop still waits."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._futures:
                raise StateError("an engine belongs to one event loop; close it before another one uses it")
            self._loop = loop
        future: asyncio.Future[object] = loop.create_future()
        self._futures[ticket] = future
        return future

    def forget(self, ticket: int) -> None:
        """Drop the answer to `ticket`, when it comes."""
        self._futures.pop(ticket, None)

    def deliver(self, answers: Sequence[tuple[int, object]]) -> None:
        """Resolve futures, on their loop. An answer that is an exception is raised."""
        for ticket, value in answers:
            future = self._futures.pop(ticket, None)
            if future is None or future.done():
                continue
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

    def deliver_soon(self, answers: Sequence[tuple[int, object]]) -> None:
        """Do so from another thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.deliver, answers)

    def fail_all(self, error: Exception) -> None:
        """Raise `error` in all that wait, on their loop."""
        self.deliver([(ticket, error) for ticket in list(self._futures)])

    def fail_all_soon(self, error: Exception) -> None:
        """Do so from another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail_all, error)
