"""Numbers of a run: metrics, the way to combine them, and the trackers that write them somewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.events import JsonValue

__all__ = ["Metric", "RunEnd", "TrackedRun", "Tracker", "reduce_metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number and how several of its name become one."""

    name: str
    value: float
    reduce: Literal["mean", "sum", "max", "min", "last"] = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is told when a run begins."""

    name: str
    """Name for people; that of the run folder."""
    run_dir: str
    """Absolute path of the run folder. What a tracker keeps on this machine lies in it, unless its options say more."""
    total_steps: int
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    """The resolved configuration: sections are mappings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What a tracker is told when a run ends."""

    outcome: Literal["finished", "failed", "interrupted"]
    summary: Mapping[str, JsonValue] = field(default_factory=dict)
    """The few numbers that say how it went; empty unless it finished."""
    error: str | None = None
    """First line of the error; None unless it failed."""


class Tracker(Protocol):
    """Writes the numbers of a run somewhere. Called as ``Class(**options)``, which checks and begins nothing.

    Three calls, since a run has a beginning, steps and an end: `start` once, `log` any number of times, `close`. They
    come one after another and from one thread, which is not that of the constructor and need not be the main one; it
    belongs to this tracker, so a call may block without holding up training. What is still unwritten when the caller's
    patience ends is lost. Mappings belong to the caller and must not be changed.

    The constructor raises `ConfigError` for options that cannot work and for a library that is missing.
    """

    def start(self, run: TrackedRun, /) -> None:
        """Begin, before any process of the run is started. What it raises refuses the run."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Record the metrics of `step`, which never goes back.

        One step may come twice, with other names the second time: validation follows a step. Values may be infinite or
        not a number, which must cost no other value. What it raises is counted and does not end the run.
        """
        ...

    def close(self, end: RunEnd, /) -> None:
        """Record how the run ended, and write everything down. Idempotent, and harmless before `start`."""
        ...


def reduce_metrics(metrics: Sequence[Metric]) -> dict[str, float]:
    """Combine metrics of one name by their `reduce`. Raises ValueError when two of one name disagree on it."""
    groups: dict[str, list[Metric]] = {}
    for metric in metrics:
        groups.setdefault(metric.name, []).append(metric)
    combined: dict[str, float] = {}
    for name, rows in groups.items():
        ways = {row.reduce for row in rows}
        if len(ways) > 1:
            raise ValueError(f"metric {name!r} is reduced in several ways: {sorted(ways)}")
        values = [row.value for row in rows]
        way = ways.pop()
        if way == "mean":
            combined[name] = sum(values) / len(values)
        elif way == "sum":
            combined[name] = sum(values)
        elif way == "max":
            combined[name] = max(values)
        elif way == "min":
            combined[name] = min(values)
        else:
            combined[name] = values[-1]
    return combined
