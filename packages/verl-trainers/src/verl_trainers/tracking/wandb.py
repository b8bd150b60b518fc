"""Metrics to Weights & Biases; without an account or a network by default."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Literal, Protocol

from verl_contracts.errors import ConfigError
from verl_trainers.tracking.libraries import require

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.events import JsonValue
    from verl_contracts.tracking import RunEnd, TrackedRun, Tracker

__all__ = ["WandbTracker"]

_log = logging.getLogger(__name__)

MODES = ("online", "offline", "disabled")
EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}
"""wandb knows a run's end by the exit code of its process."""


class _Summary(Protocol):
    def update(self, values: Mapping[str, JsonValue], /) -> None: ...


class _Run(Protocol):
    """What is used of a `wandb.Run`."""

    @property
    def dir(self) -> str: ...

    @property
    def url(self) -> str | None: ...

    @property
    def summary(self) -> _Summary: ...

    def log(self, data: Mapping[str, float], /, step: int) -> None: ...

    def finish(self, exit_code: int) -> None: ...


class WandbTracker:
    """Writes a wandb run below the run folder, and sends it when it is online.

    Offline unless `mode` or the environment variable WANDB_MODE says otherwise; ``wandb sync`` sends it later.
    """

    def __init__(
        self,
        *,
        project: str = "verl",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        """Take wandb's own options. None means: name of the run folder; no entity or group; WANDB_MODE, or offline."""
        require("wandb", extra="wandb")
        self._project = project
        self._name = name
        self._entity = entity
        self._group = group
        self._tags = tuple(tags)
        self._mode = mode or os.environ.get("WANDB_MODE") or "offline"
        if self._mode not in MODES:
            origin = "mode" if mode else "the environment variable WANDB_MODE"
            raise ConfigError(f"{origin} must be one of {', '.join(MODES)}, got {self._mode!r}")
        self._run: _Run | None = None

    def start(self, run: TrackedRun, /) -> None:
        """Open the run. wandb shows nothing on the terminal and does not capture it."""
        import wandb

        opened: _Run = wandb.init(
            project=self._project,
            name=self._name or run.name,
            entity=self._entity,
            group=self._group,
            tags=self._tags,
            dir=run.run_dir,
            mode=self._mode,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run = opened
        _log.info("wandb run: %s", opened.url or opened.dir)

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Send the metrics of `step`; wandb merges those of one step."""
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def close(self, end: RunEnd, /) -> None:
        """Add the summary, finish the run with its outcome, and wait until wandb's own process has written it."""
        if self._run is None:
            return
        import wandb

        run, self._run = self._run, None
        error = {} if end.error is None else {"error": end.error}
        run.summary.update({**end.summary, "outcome": end.outcome, **error})
        run.finish(exit_code=EXIT_CODES[end.outcome])
        if wandb.run is None:  # otherwise somebody else's run needs that process
            wandb.teardown()


if TYPE_CHECKING:

    def _is_tracker(x: WandbTracker) -> Tracker:
        return x
