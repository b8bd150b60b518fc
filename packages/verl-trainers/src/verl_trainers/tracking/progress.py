"""A line on the terminal that says where the run is."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.tracking import RunEnd, TrackedRun, Tracker

__all__ = ["ProgressLine"]

_log = logging.getLogger(__name__)


class ProgressLine:
    """Shows where the run is: one line that changes on a terminal, about twenty plain lines elsewhere."""

    def __init__(self, *, stream: TextIO | None) -> None:
        """Write to `stream`; None, or one that breaks, shows nothing."""
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._total = 0
        self._every = 1
        self._began = time.monotonic()
        self._width = 0

    def start(self, run: TrackedRun, /) -> None:
        """Learn how many steps there will be."""
        self._total = run.total_steps
        self._every = max(1, run.total_steps // 20)
        self._began = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Show `step`."""
        if "val/score" in metrics:
            self._line(f"step {step}/{self._total}  validation {metrics['val/score']:.3f}")
        if "reward" not in metrics:
            return
        text = (
            f"step {step}/{self._total}  reward {metrics['reward']:.3f}"
            f"  staleness {metrics.get('staleness/max', 0.0):.0f}"
            f"  {metrics.get('samples_per_s', 0.0):.0f} samples/s  {time.monotonic() - self._began:.1f} s"
        )
        if self._terminal:
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif step % self._every == 0 or step in (1, self._total):
            self._line(text)

    def close(self, end: RunEnd, /) -> None:
        """End the line."""
        if self._width:
            self._line("")

    def _line(self, text: str) -> None:
        blank = ("\n" if not text else "\r" + " " * self._width + "\r") if self._width else ""
        self._width = 0
        self._write(blank + (text + "\n" if text else ""))

    def _write(self, text: str) -> None:
        """Write, and go silent when nobody reads any more: a closed pipe must not end a run."""
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as exc:
            _log.warning("progress is not shown any more: %s", exc)
            self._stream = None


if TYPE_CHECKING:

    def _is_tracker(x: ProgressLine) -> Tracker:
        return x
