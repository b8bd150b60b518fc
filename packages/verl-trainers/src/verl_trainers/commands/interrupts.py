"""Ctrl-C and SIGTERM, from the first import of a run to its end."""

from __future__ import annotations

import signal

__all__ = ["Interrupts", "ignore_interrupts"]


class Interrupts:
    """Remembers that the user asked to stop.

    A `KeyboardInterrupt` that is raised inside an import or a destructor can be swallowed there, or come out as another
    error; so starting looks here as well.
    """

    def __init__(self) -> None:
        """Listen for SIGTERM, and for SIGINT unless it is ignored, as it is in a shell's background jobs."""
        self.asked = False
        self._heeds = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        signal.signal(signal.SIGTERM, self._stop)
        if self._heeds:
            signal.signal(signal.SIGINT, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the user asked to stop."""
        if self.asked:
            raise KeyboardInterrupt

    def hand_over(self) -> None:
        """Leave interrupts to the event loop that is about to run, which cancels its main task."""
        self.check()
        if self._heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def ignore_interrupts() -> None:
    """Hear no more of either: everything is stopped, and asking again must not break the exit."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
