"""Virtual time: an event loop whose clock jumps to the next thing due, so that hours pass in milliseconds.

`asyncio.sleep`, `asyncio.timeout` and `bounded` all obey it. Nothing on it may depend on threads, processes or sockets:
the loop jumps as soon as no callback is ready, and would not wait for them.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine


__all__ = ["VirtualClock", "VirtualLoop", "run_virtual"]

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Returns at once, and moves the loop's time on by what it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock on the virtual clock: every task waits and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._jumping.now


class VirtualClock:
    """The `Clock` of a `VirtualLoop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Return the loop's time."""
        return self._loop.time()

    def wall(self) -> float:
        """Return the loop's time, counted from an arbitrary day."""
        return 1.7e9 + self._loop.time()

    async def sleep(self, seconds: float, /) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(max(0.0, seconds))


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """Run `main` to its end on a fresh `VirtualLoop` and return its result.

    Raises RuntimeError when every task waits and no timer is set: in virtual time a deadlock is found at once.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
