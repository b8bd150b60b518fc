"""Metrics as TensorBoard event files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from verl_trainers.tracking.libraries import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.tracking import RunEnd, TrackedRun, Tracker

__all__ = ["TensorboardTracker"]


class _Writer(Protocol):
    """What is used of torch's `SummaryWriter`."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> None: ...

    def add_text(self, tag: str, text: str, step: int, /) -> None: ...

    def close(self) -> None: ...


class TensorboardTracker:
    """Writes event files, by default to ``tensorboard/`` in the run folder.

    Look at them with ``tensorboard --logdir RUN``. Configuration and summary appear as texts.
    """

    def __init__(self, *, log_dir: str | None = None, flush_s: int = 10) -> None:
        """Write to `log_dir`; None means the run folder. What is there is at most `flush_s` seconds old."""
        require("tensorboard", extra="tensorboard")
        self._log_dir = log_dir
        self._flush_s = flush_s
        self._writer: _Writer | None = None
        self._step = 0

    def start(self, run: TrackedRun, /) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._log_dir) / run.name if self._log_dir is not None else Path(run.run_dir) / "tensorboard"
        self._writer = SummaryWriter(str(folder), flush_secs=self._flush_s)
        self._writer.add_text("config", _block(run.config), 0)

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Write one scalar per metric."""
        if self._writer is None:
            return
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, end: RunEnd, /) -> None:
        """Write how the run ended, and close the file."""
        if self._writer is None:
            return
        text = {"outcome": end.outcome, "error": end.error, "summary": end.summary}
        self._writer.add_text("end", _block(text), self._step)
        self._writer.close()
        self._writer = None


def _block(value: object) -> str:
    """Return JSON as a block of Markdown code, which is how TensorBoard shows texts."""
    return "".join(f"    {line}\n" for line in json.dumps(value, indent=2, ensure_ascii=False).splitlines())


if TYPE_CHECKING:

    def _is_tracker(x: TensorboardTracker) -> Tracker:
        return x
