"""Numbers of one step that the driver knows without looking at a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.samples import GroupResult

__all__ = ["GroupMetrics", "StepClock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetrics:
    """Numbers of a batch. Staleness in step s of a token of version v is (s - 1) - v."""

    groups: int
    samples: int
    score: float
    """Mean over scored samples."""
    response_tokens: float
    """Mean trained tokens in a sample."""
    truncated: float
    """Part of samples that the length budget ended."""
    seconds: float
    """Mean time of a sample, from its start to its score."""
    staleness: Mapping[int, int]
    """Staleness of a sample's oldest trained token → samples."""
    extra: Mapping[str, float]
    """Numbers from agent loops and rewards, averaged over the samples that have them."""

    @classmethod
    def of(cls, groups: Sequence[GroupResult], *, step: int) -> GroupMetrics:
        """Measure the groups that step `step` trains on."""
        samples = [sample for group in groups for sample in group.scored]
        count = max(1, len(samples))
        staleness: dict[int, int] = {}
        sums: dict[str, list[float]] = {}
        for sample in samples:
            if sample.versions is not None:
                stale = step - 1 - sample.versions[0]
                staleness[stale] = staleness.get(stale, 0) + 1
            for name, value in sample.metrics.items():
                sums.setdefault(name, []).append(value)
        return cls(
            groups=len(groups),
            samples=len(samples),
            score=sum(sample.score or 0.0 for sample in samples) / count,
            response_tokens=sum(sample.num_trained for sample in samples) / count,
            truncated=sum(sample.truncated for sample in samples) / count,
            seconds=sum(sample.seconds for sample in samples) / count,
            staleness=dict(sorted(staleness.items())),
            extra={name: sum(values) / len(values) for name, values in sums.items()},
        )

    @property
    def max_staleness(self) -> int:
        """Staleness of the oldest token; 0 without any."""
        return max(self.staleness, default=0)

    def as_dict(self) -> dict[str, float]:
        """Return flat metrics."""
        flat = {
            "reward": self.score,
            "response_tokens": self.response_tokens,
            "truncated": self.truncated,
            "seconds/sample": self.seconds,
            "staleness/max": float(self.max_staleness),
            "staleness/mean": sum(k * n for k, n in self.staleness.items()) / max(1, sum(self.staleness.values())),
        }
        flat |= {f"staleness/{k}": float(n) for k, n in self.staleness.items()}
        return flat | {f"sample/{name}": value for name, value in self.extra.items()}


class StepClock:
    """Splits a step into named laps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._last = clock.now()
        self.laps: dict[str, float] = {}
        """Lap → seconds."""

    def lap(self, name: str) -> None:
        """Count the time since the last lap under `name`."""
        now = self._clock.now()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._began
