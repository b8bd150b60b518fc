"""Rewards: judged apart from generation, with a typed outcome, under a limit that is enforced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from verl_contracts.pickling import cheap_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.clock import Deadline
    from verl_contracts.events import JsonValue
    from verl_contracts.samples import Outcome

__all__ = ["RewardClient", "RewardFunction", "RewardRequest", "RewardResult"]

_MAX_SCORE = 3.4028234663852886e38
"""Largest float32: training computes in it, so a larger score would be infinite there."""


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """What is judged: one finished sample."""

    uid: str
    sample: int
    data_source: str
    response_ids: tuple[int, ...]
    """Sampled ids of the last trajectory, up to and with the stop id."""
    ground_truth: JsonValue
    extra_info: Mapping[str, JsonValue] = field(default_factory=dict)
    truncated: bool = False
    """Whether the length budget ended the response."""


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A verdict. `score` is set exactly when `outcome` is scored, and finite in float32; else raises ValueError."""

    outcome: Outcome
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, averaged over the step."""
    reason: str = ""
    """Why there is no score."""

    def __post_init__(self) -> None:
        if (self.outcome == "scored") != (self.score is not None):
            raise ValueError(f"a score belongs to the outcome 'scored' only, got {self.outcome!r} with {self.score!r}")
        if self.score is not None and not abs(self.score) <= _MAX_SCORE:
            raise ValueError(f"the score must be finite in float32, within ±{_MAX_SCORE:.3g}, got {self.score!r}")


class RewardFunction(Protocol):
    """Judges one response. Plain and blocking: it runs in a child process that can be killed.

    Called as ``Class(**options)``. May raise; that is a failed sample, not a score.
    """

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        """Judge `response`, the decoded `response_ids` without special tokens."""
        ...


class RewardClient(Protocol):
    """How an agent-loop worker asks for a reward. Built from an `ObjectSpec`."""

    async def score(self, request: RewardRequest, /, *, deadline: Deadline) -> RewardResult:
        """Judge. Never raises for the function's own failure: the outcome says so."""
        ...

    async def close(self) -> None:
        """Stop the reward processes. Idempotent."""
        ...
