"""What a row of the bench is: a claim before it is measured, and its figure afterwards.

A figure always carries its spread, what it was measured against, and what it leaves out, so that no number can be
quoted without its conditions. Standard library only: the README's table is made from this without installing anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BenchError", "Benchmark", "Conditions", "Row", "Target"]


class BenchError(RuntimeError):
    """A row could not be measured; nothing is written for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure should reach: at least `limit`, or less than it."""

    limit: float
    at_least: bool = True
    """Whether more is better."""

    def met_by(self, figure: float, /) -> bool:
        """Return whether `figure` reaches this."""
        return figure >= self.limit if self.at_least else figure < self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '<'} {self.limit:g}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that `str` wrote."""
        sign, _, limit = text.partition(" ")
        if sign not in ("≥", "<"):
            raise ValueError(f"a target reads '≥ 0.8' or '< 500', got {text!r}")
        return cls(limit=float(limit), at_least=sign == "≥")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. With a baseline it is a ratio, ours over the baseline's; without one it is a plain value."""

    name: str
    figure: float
    """Median over `count` measurements."""
    spread: tuple[float, float]
    """Lower and upper quartile."""
    count: int
    """Pairs for a ratio, repetitions for a value."""
    leaves_out: str
    """What the figure does not contain, or does not tell."""
    baseline: str | None = None
    """What a ratio is taken against; None for a value."""
    unit: str = ""
    """Unit of a value, empty for a ratio."""
    target: Target | None = None
    """None for a figure that explains another."""
    settings: str = ""
    """How both sides were run, as far as a reader needs it to judge or repeat the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How a row is to be measured."""

    pairs: int
    """Alternating pairs, or repetitions of a plain value."""
    folder: Path
    """An empty folder for whatever the measurement writes; it is removed afterwards."""
    smollm2: Path
    """Folder of SmolLM2-135M-Instruct, as `tools/make_smollm2.py` makes it; may be missing."""


class Benchmark(Protocol):
    """A claim that can be measured. One file in `rows` holds one, or a family of them."""

    @property
    def name(self) -> str:
        """Name of the first row that `measure` returns, and of the results file."""
        ...

    @property
    def target(self) -> Target:
        """What that row should reach."""
        ...

    @property
    def baseline(self) -> str | None:
        """What that row is taken against; None for a plain value."""
        ...

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Measure: the claim's row first, then figures that explain it. Raises `BenchError`."""
        ...
