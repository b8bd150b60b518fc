"""Time as the control code sees it. Everything that waits takes a `Clock`, so tests can run it on a virtual one.

`Clock.now` agrees with `asyncio.get_running_loop().time()`: a virtual clock is an event loop whose time jumps, hence
`asyncio.timeout` and `asyncio.sleep` obey it too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Clock", "Deadline", "SystemClock"]


class Clock(Protocol):
    """Monotonic time, wall time, and sleeping. The whole surface, because nothing else may depend on real time."""

    def now(self) -> float:
        """Return monotonic seconds; comparable only within one process."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch, for logs only."""
        ...

    async def sleep(self, seconds: float, /) -> None:
        """Return after `seconds`; at once when they are not positive."""
        ...


class SystemClock:
    """The real clock."""

    def now(self) -> float:
        """Return `time.monotonic()`, which is also what asyncio's own loops use."""
        return time.monotonic()

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()

    async def sleep(self, seconds: float, /) -> None:
        """Sleep on the running loop."""
        import asyncio  # here, because data types need deadlines and no event loop

        await asyncio.sleep(max(0.0, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment on one process's clock, with the limit it came from.

    Between processes only the remaining seconds travel; the runtime rebases them onto the receiver's clock.
    """

    at: float
    """Monotonic seconds, on the clock that made it."""
    limit_s: float
    """Seconds that were allowed in total, for messages."""
    setting: str = ""
    """Config key that the limit comes from, for messages; empty when it comes from none."""

    @classmethod
    def after(cls, clock: Clock, seconds: float, *, setting: str = "") -> Deadline:
        """Return the deadline `seconds` from now on `clock`."""
        return cls(at=clock.now() + seconds, limit_s=seconds, setting=setting)

    def remaining(self, clock: Clock) -> float:
        """Return the seconds left on `clock`, never negative."""
        return max(0.0, self.at - clock.now())

    def within(self, clock: Clock, seconds: float, *, setting: str = "") -> Deadline:
        """Return the earlier of this deadline and one `seconds` from now, which `setting` names."""
        other = Deadline.after(clock, seconds, setting=setting)
        return other if other.at < self.at else self
