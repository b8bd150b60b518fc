"""All trackers of one run, from its configuration to what becomes of them in the summary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_plugin
from verl_contracts.tracking import RunEnd
from verl_trainers.tracking.guard import GuardedTracker
from verl_trainers.tracking.jsonl import JsonlTracker
from verl_trainers.tracking.options import sort_options
from verl_trainers.tracking.progress import ProgressLine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from verl_contracts.events import JsonValue
    from verl_contracts.tracking import TrackedRun, Tracker
    from verl_trainers.config.schema import TrainerConfig

__all__ = ["ALWAYS", "RunTrackers", "build_tracker", "tracked"]

ALWAYS = "jsonl"
"""Name of the tracker that every run has, named or not."""
_PROGRESS = "progress"


@dataclass(slots=True)
class RunTrackers:
    """The started trackers of a run."""

    trackers: Sequence[GuardedTracker]
    summary: Mapping[str, JsonValue] = field(default_factory=dict)
    """What a run that finishes says about itself; set it before the block ends."""

    def reports(self) -> list[JsonValue]:
        """Return what became of the calls to each tracker, the progress line left out."""
        return [tracker.report.as_json() for tracker in self.trackers if tracker.report.name != _PROGRESS]


def build_tracker(cls: type[Tracker], config: TrainerConfig, name: str) -> Tracker:
    """Build the tracker that `config` calls `name`. Raises `ConfigError` naming the option that is wrong."""
    mine = sort_options(config.logger_options, tuple({*config.logger, name})).of(name)
    options = mine.value or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{mine.key}: must be options (key: value lines), got {options!r}")
    return build_plugin(cls, options, key=mine.key)


@contextmanager
def tracked(
    classes: Sequence[type[Tracker]], config: TrainerConfig, run: TrackedRun, *, progress: TextIO | None
) -> Iterator[RunTrackers]:
    """Start the trackers of `config`, and `jsonl` in any case; close each with how the block ended.

    Args:
        classes: Those that `config.logger` names, in its order.
        config: Names, options and limit.
        run: What trackers are told.
        progress: Where the line with the progress goes; None shows none.

    Raises `ConfigError` for a tracker that does not start; those before it are closed.
    """
    trackers = [GuardedTracker(_PROGRESS, ProgressLine(stream=progress), limit_s=config.logger_limit_s)]
    if JsonlTracker not in classes:
        trackers.append(
            GuardedTracker(ALWAYS, build_tracker(JsonlTracker, config, ALWAYS), limit_s=config.logger_limit_s)
        )
    for name, cls in zip(config.logger, classes, strict=True):
        trackers.append(GuardedTracker(name, build_tracker(cls, config, name), limit_s=config.logger_limit_s))
    running = RunTrackers(trackers)
    end = RunEnd(outcome="interrupted")
    try:
        for tracker in trackers:
            tracker.start(run)
        yield running
        end = RunEnd(outcome="finished", summary=running.summary)
    except Exception as exc:
        end = RunEnd(outcome="failed", error=f"{type(exc).__name__}: {exc}".partition("\n")[0])
        raise
    finally:
        for tracker in trackers:
            tracker.close(end)
