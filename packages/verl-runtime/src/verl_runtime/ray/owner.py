"""An actor ends itself when its owner has been silent for long.

The watch is a thread, so that a busy event loop cannot stop it; and it counts silence only while it gets to run itself,
so that a computation which holds the interpreter for a minute is not mistaken for a minute of silence.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OwnerWatch"]


class OwnerWatch:
    """Calls `on_silence` once, on its own thread, after `limit_s` without a `beat`."""

    def __init__(self, *, limit_s: float, on_silence: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._every_s = min(0.5, limit_s / 8)
        self._silent_s = 0.0
        threading.Thread(target=self._watch, name="owner-watch", daemon=True).start()

    def beat(self) -> None:
        """Note that the owner lives."""
        self._silent_s = 0.0

    def _watch(self) -> None:
        last = time.monotonic()
        while self._silent_s < self._limit_s:
            time.sleep(self._every_s)
            now = time.monotonic()
            self._silent_s += min(now - last, 2 * self._every_s)
            last = now
        self._on_silence()
