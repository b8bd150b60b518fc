"""Comparing two sides on a machine whose speed drifts: they take turns, and each pair gives one ratio.

A median over pairs hides neither a slow minute (both sides of a pair share it) nor luck (the quartiles show it).
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["middle", "ratios", "take_turns"]

T = TypeVar("T")


def take_turns(sides: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """Call all sides one after the other, `rounds` times, and return what each returned: A B A B, not A A B B."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return one ratio for each pair. Both are speeds, so that more than 1 means that ours is faster."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and the quartiles; of a single value that value."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (low, high)
