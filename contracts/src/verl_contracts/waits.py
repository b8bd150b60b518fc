"""No wait without a limit, and every wait visible.

`bounded` is the one way to await something that another party must provide. While it waits, the wait is listed in a
`Waits` registry with its subject and holder; a watchdog prints what has been listed for long; at the limit it raises
`WaitTimeout`. The lint rule in `tools/lint_waits.py` refuses waits that go around it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from verl_contracts.clock import SystemClock
from verl_contracts.errors import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """A wait while it lasts. `bounded` makes hundreds of them in a step, so each is one object and no timer."""

    subject: str
    holder: str | Callable[[], str]
    since: float
    limit_s: float
    at: float
    """When it runs out, on the loop's clock."""
    task: asyncio.Task[object]
    expired: bool = False


class _Alarm:
    """Ends the waits of one event loop at their limits, with one timer for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self.rows: dict[int, _Open] = {}

    def add(self, key: int, row: _Open) -> None:
        """Watch `row` until it is taken out of `rows`."""
        self.rows[key] = row
        if self._timer is None or row.at < self._timer.when():
            self._set(row.at)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        """End what is due; the timer may be older than the waits, for it stays when the wait that set it is over."""
        self._timer = None
        now = self._loop.time() + _RESOLUTION_S
        following: float | None = None
        for row in self.rows.values():
            if row.expired:
                continue
            if row.at <= now:
                row.expired = True
                row.task.cancel()
            elif following is None or row.at < following:
                following = row.at
        if following is not None:
            self._set(following)


class Waits:
    """The waits of one process. Reading from other threads is safe."""

    def __init__(self) -> None:
        self._alarms: WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm] = WeakKeyDictionary()
        self._ids = itertools.count()

    def current(self) -> tuple[Wait, ...]:
        """Return the waits in progress, oldest first."""
        rows = [row for alarm in list(self._alarms.values()) for row in alarm.rows.copy().values()]
        return tuple(
            Wait(
                subject=row.subject,
                holder=row.holder if isinstance(row.holder, str) else row.holder(),
                since=row.since,
                limit_s=row.limit_s,
            )
            for row in sorted(rows, key=lambda row: row.since)
        )

    def _alarm(self, loop: asyncio.AbstractEventLoop) -> _Alarm:
        """Return what ends the waits of `loop`."""
        alarm = self._alarms.get(loop)
        if alarm is None:
            alarm = self._alarms[loop] = _Alarm(loop)
        return alarm

    def _next_key(self) -> int:
        """Return a key that no other wait has."""
        return next(self._ids)


WAITS = Waits()
"""The registry of this process, used when none is passed."""

_SYSTEM = SystemClock()
_RESOLUTION_S = 1e-9
_NUMBER = re.compile(r"\d+")


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
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    if task is None:
        raise RuntimeError("bounded() must be awaited inside a task")
    begun, now = task.cancelling(), clock.now()
    row = _Open(
        subject=subject,
        holder=holder,
        since=now,
        limit_s=deadline.limit_s,
        at=loop.time() + max(0.0, deadline.at - now),
        task=task,
    )
    alarm, key = waits._alarm(loop), waits._next_key()
    alarm.add(key, row)
    try:
        return await awaitable  # wait: the alarm ends it
    except asyncio.CancelledError as exc:
        if row.expired:
            row.expired = False
            if task.uncancel() <= begun:  # nobody else asked for it
                who = holder if isinstance(holder, str) else holder()
                raise WaitTimeout(subject, who, deadline.limit_s, deadline.setting) from exc
        raise
    finally:
        del alarm.rows[key]
        if row.expired:  # the awaitable ended in another way than by our cancelling
            task.uncancel()


async def watch_waits(*, clock: Clock, older_than_s: float = 10.0, every_s: float = 5.0, waits: Waits = WAITS) -> None:
    """Log, for ever, waits that are older than `older_than_s`, and again each time that they are twice as old.

    Of those that differ in a number only, the oldest is told, and how many there are: a warning once half of its limit
    is over. Run it as a task and cancel it to stop.
    """
    told: dict[str, float] = {}
    while True:
        await clock.sleep(every_s)
        now = clock.now()
        alike: dict[str, list[Wait]] = {}
        for wait in waits.current():
            alike.setdefault(_NUMBER.sub("#", wait.subject), []).append(wait)
        told = {kind: age for kind, age in told.items() if kind in alike and now - alike[kind][0].since >= age}
        for kind, group in alike.items():
            oldest = group[0]
            age = now - oldest.since
            if age < max(older_than_s, 2 * told.get(kind, 0.0)):
                continue
            told[kind] = age
            level = logging.WARNING if age >= oldest.limit_s / 2 else logging.INFO
            more = f", and {len(group) - 1} more like it" if len(group) > 1 else ""
            text = "waiting %.0f s of %.0f s for %s, held by %s%s"
            _log.log(level, text, age, oldest.limit_s, oldest.subject, oldest.holder, more)
