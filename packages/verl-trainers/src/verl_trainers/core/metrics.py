"""Numbers of one step that the driver knows without looking at a token."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.samples import ABSTAINED, FAILED, TIMED_OUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.samples import GroupResult

__all__ = ["DISCARDS", "INFRASTRUCTURE", "STALE", "UNUSABLE", "GroupMetrics", "RunCounters", "StepClock"]

ADMITTED, DROPPED, DISCARDED_TOKENS = "admitted", "dropped", "discarded tokens"
"""Names among the producer's counts."""
UNUSABLE, STALE, INFRASTRUCTURE = "unusable", "stale", "infrastructure"
DISCARDS = (UNUSABLE, STALE, INFRASTRUCTURE)
"""Why groups are dropped."""
FAILURES = (FAILED, TIMED_OUT, ABSTAINED)
"""How a sample may end without a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetrics:
    """Numbers of a batch. Staleness in step s of a token of version v is (s - 1) - v."""

    groups: int
    scores: tuple[float, ...]
    """Of all samples trained on; everything below is about the same samples."""
    prompt_tokens: tuple[int, ...]
    """Tokens that the policy did not sample."""
    trained_tokens: tuple[int, ...]
    truncated: float
    """Part of samples that the length budget ended."""
    seconds: float
    """Mean time of a sample, from its start to its score."""
    staleness: Mapping[int, int]
    """Staleness of a sample's oldest trained token → samples; from 0 to the bound, and beyond if there are such."""
    extra: Mapping[str, float]
    """Numbers from agent loops and rewards, averaged over the samples that have them."""

    @classmethod
    def of(cls, groups: Sequence[GroupResult], *, step: int, bound: int) -> GroupMetrics:
        """Measure the groups that step `step` trains on; `bound` is the largest staleness allowed."""
        samples = [sample for group in groups for sample in group.scored]
        staleness = Counter(dict.fromkeys(range(bound + 1), 0))
        sums: dict[str, list[float]] = {}
        for sample in samples:
            if sample.versions is not None:
                staleness[step - 1 - sample.versions[0]] += 1
            for name, value in sample.metrics.items():
                sums.setdefault(name, []).append(value)
        return cls(
            groups=len(groups),
            scores=tuple(sample.score for sample in samples if sample.score is not None),
            prompt_tokens=tuple(sample.num_tokens - sample.num_trained for sample in samples),
            trained_tokens=tuple(sample.num_trained for sample in samples),
            truncated=_mean([float(sample.truncated) for sample in samples]),
            seconds=_mean([sample.seconds for sample in samples]),
            staleness=dict(sorted(staleness.items())),
            extra={name: _mean(values) for name, values in sums.items()},
        )

    @property
    def score(self) -> float:
        """Mean score."""
        return _mean(self.scores)

    @property
    def max_staleness(self) -> int:
        """Staleness of the oldest token; 0 without any."""
        return max((versions for versions, count in self.staleness.items() if count), default=0)

    def as_dict(self) -> dict[str, float]:
        """Return flat metrics."""
        mean = self.score
        stale = sum(versions * count for versions, count in self.staleness.items())
        flat = {
            "reward": mean,
            "reward/std": math.sqrt(_mean([(score - mean) ** 2 for score in self.scores])),
            "prompt_length/mean": _mean(self.prompt_tokens),
            "prompt_length/max": float(max(self.prompt_tokens, default=0)),
            "response_length/mean": _mean(self.trained_tokens),
            "response_length/max": float(max(self.trained_tokens, default=0)),
            "truncated": self.truncated,
            "seconds/sample": self.seconds,
            "staleness/max": float(self.max_staleness),
            "staleness/mean": stale / max(1, sum(self.staleness.values())),
        }
        flat |= {f"staleness/{versions}": float(count) for versions, count in self.staleness.items()}
        return flat | {f"sample/{name}": value for name, value in self.extra.items()}


@dataclass(slots=True)
class RunCounters:
    """What has happened so far, over all steps."""

    groups_trained: int = 0
    tokens_trained: int = 0
    process_failures: int = 0
    """Failures of processes that the runtime reported."""

    def as_dict(self, produced: Counter[str], *, ready: int) -> dict[str, float]:
        """Return flat metrics.

        Args:
            produced: The producer's counts.
            ready: Groups that wait to be trained.
        """
        outstanding = produced[ADMITTED] - produced[DROPPED] - self.groups_trained
        generated = self.tokens_trained + produced[DISCARDED_TOKENS]
        return {
            "groups_outstanding": float(outstanding),
            "groups_in_play": float(outstanding - ready),
            "groups_ready": float(ready),
            "groups_dropped": float(produced[DROPPED]),
            "useful_tokens": self.tokens_trained / generated if generated else 1.0,
            "failures/processes": float(self.process_failures),
            **{f"discards/{reason}": float(produced[f"{DROPPED}: {reason}"]) for reason in DISCARDS},
            **{f"failures/{outcome}": float(produced[f"samples: {outcome}"]) for outcome in FAILURES},
        }


class StepClock:
    """Splits a step into named laps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._last = clock.now()
        self.laps: dict[str, float] = {}
        """Lap → seconds."""

    def lap(self, name: str, *, parts: Mapping[str, float] | None = None) -> None:
        """Count the time since the last lap under `name`. `parts` says where it went, as far as that is known."""
        now = self._clock.now()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
        self.laps |= {f"{name}/{part}": seconds for part, seconds in (parts or {}).items()}

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._began

    def as_dict(self) -> dict[str, float]:
        """Return flat metrics."""
        return {"seconds/step": self.total, **{f"seconds/{name}": seconds for name, seconds in self.laps.items()}}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
