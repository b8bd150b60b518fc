"""Metrics where a person or a script looks for them: a file of JSON lines, and a line on the terminal."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.tracking import Tracker

__all__ = ["JsonlTracker", "ProgressLine"]

_log = logging.getLogger(__name__)


class JsonlTracker:
    """Appends one JSON object per call to ``metrics.jsonl`` in the run folder. Numbers that are not finite are null."""

    def __init__(self, *, run_dir: str) -> None:
        self._file = (Path(run_dir) / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Record the metrics of `step`, and make them visible to readers at once."""
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class ProgressLine:
    """Shows where the run is: one line that changes on a terminal, about twenty plain lines elsewhere."""

    def __init__(self, *, total_steps: int, stream: TextIO | None) -> None:
        """Write to `stream`; None, or one that breaks, shows nothing."""
        self._total = total_steps
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._every = max(1, total_steps // 20)
        self._began = time.monotonic()
        self._width = 0

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

    def close(self) -> None:
        """End the line. Idempotent."""
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

    def _is_jsonl_tracker(x: JsonlTracker) -> Tracker:
        return x

    def _is_progress_tracker(x: ProgressLine) -> Tracker:
        return x
