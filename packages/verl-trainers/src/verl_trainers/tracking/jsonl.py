"""Metrics as JSON lines in the run folder, for scripts and for those who want no service."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.tracking import RunEnd, TrackedRun, Tracker

__all__ = ["JsonlTracker"]


class JsonlTracker:
    """Appends one object per call to ``metrics.jsonl``. Numbers that are not finite are null.

    Configuration and summary are files of the run folder anyway, and are not repeated.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def start(self, run: TrackedRun, /) -> None:
        """Open the file."""
        self._file = (Path(run.run_dir) / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Write one line, and make it visible to readers at once."""
        if self._file is None:
            return
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self, end: RunEnd, /) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


if TYPE_CHECKING:

    def _is_tracker(x: JsonlTracker) -> Tracker:
        return x
