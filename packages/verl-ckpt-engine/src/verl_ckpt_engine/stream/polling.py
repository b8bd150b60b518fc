"""How an edge waits for a library that tells nothing by itself: it asks again and again, until it is cut."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_contracts.clock import Clock, Deadline

__all__ = ["Polling"]

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.0002
"""Short beside the time that a bucket takes."""
_LONGEST_PAUSE_S: Final = 0.001
"""Long enough that an edge at rest costs little."""
_GROWTH: Final = 1.1


class Polling:
    """One end's patience."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cut = False

    def cut(self) -> None:
        """Make `until` raise soon. From any thread."""
        self._cut = True

    def until(self, found: Callable[[], T | None], deadline: Deadline) -> T:
        """Return what `found` returns once that is something. Raises at the deadline, and when it is cut."""
        pause_s = _FIRST_PAUSE_S
        while (result := found()) is None:
            if self._cut or not deadline.remaining(self._clock):
                raise RuntimeError("it was given up")
            time.sleep(pause_s)
            pause_s = min(pause_s * _GROWTH, _LONGEST_PAUSE_S)
        return result
