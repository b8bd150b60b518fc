"""No wait without a limit, and every wait visible.

`bounded` is the one way to await something that another party must provide. While it waits, the wait is listed in a
`Waits` registry with its subject and holder; a watchdog prints what has been listed for long; at the limit it raises
`WaitTimeout`. The lint rule in `tools/lint_waits.py` refuses waits that go around it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.clock import SystemClock
from verl_contracts.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from verl_contracts.clock import Clock, Deadline

__all__ = ["WAITS", "Wait", "Waits", "bounded", "watch_waits"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait in progress."""

    subject: str
    """What is awaited, for example ``"weight transfer of version 7"``."""
    holder: str
    """Who should provide it, for example ``"replica 2"``; several names are separated by commas."""
    since: float
    """Monotonic seconds at which the wait began."""
    limit_s: float
    """Seconds after which it becomes an error."""


class Waits:
    """The waits of one process. Used from one event loop; reading from other threads is safe."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[str, str | Callable[[], str], float, float]] = {}
        self._ids = itertools.count()

    @contextmanager
    def listed(self, subject: str, holder: str | Callable[[], str], *, since: float, limit_s: float) -> Iterator[None]:
        """List a wait for the duration of the block."""
        key = next(self._ids)
        self._open[key] = (subject, holder, since, limit_s)
        try:
            yield
        finally:
            del self._open[key]

    def current(self) -> tuple[Wait, ...]:
        """Return the waits in progress, oldest first."""
        rows = sorted(self._open.copy().values(), key=lambda row: row[2])
        return tuple(
            Wait(subject=subject, holder=holder if isinstance(holder, str) else holder(), since=since, limit_s=limit_s)
            for subject, holder, since, limit_s in rows
        )


WAITS = Waits()
"""The registry of this process, used when none is passed."""

_SYSTEM = SystemClock()


async def bounded(
    awaitable: Awaitable[T],
    *,
    subject: str,
    holder: str | Callable[[], str],
    deadline: Deadline,
    clock: Clock = _SYSTEM,
    waits: Waits = WAITS,
) -> T:
    """Await `awaitable` until `deadline`; list the wait meanwhile.

    `holder` may be a function: it is asked when the wait is shown or runs out, so that it can name who is
    still missing. Raises `WaitTimeout` at the deadline, after cancelling `awaitable`. Errors of `awaitable` pass
    through unchanged, a `TimeoutError` of its own included.
    """
    remaining = deadline.remaining(clock)
    limit = asyncio.timeout(remaining)
    try:
        with waits.listed(subject, holder, since=clock.now(), limit_s=deadline.limit_s):
            async with limit:
                return await awaitable
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise WaitTimeout(subject, holder if isinstance(holder, str) else holder(), deadline.limit_s) from exc


async def watch_waits(*, clock: Clock, older_than_s: float = 10.0, every_s: float = 5.0, waits: Waits = WAITS) -> None:
    """Log, for ever, each wait that is older than `older_than_s`. Run it as a task and cancel it to stop."""
    while True:
        await clock.sleep(every_s)
        now = clock.now()
        for wait in waits.current():
            age = now - wait.since
            if age >= older_than_s:
                _log.warning(
                    "waiting %.0f s of %.0f s for %s, held by %s", age, wait.limit_s, wait.subject, wait.holder
                )
