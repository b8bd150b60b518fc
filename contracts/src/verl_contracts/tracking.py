"""Metrics, with the way to combine them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Metric", "Tracker", "reduce_metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number and how several of its name become one."""

    name: str
    value: float
    reduce: Literal["mean", "sum", "max", "min", "last"] = "mean"


class Tracker(Protocol):
    """Writes metrics somewhere. Called as ``Class(run_dir=folder)``, then once a step from the driver.

    Must not block for long.
    """

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Record the metrics of `step`."""
        ...

    def close(self) -> None:
        """Flush. Idempotent."""
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
