"""Whether a step has anything to learn from: an advantage other than 0 in one of its groups.

Owns two lines of the log, whatever the length of a run. It prevents a run that cannot learn, since its reward tells no
answers apart, from looking like one that is slow to learn.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SignalWatch"]

_log = logging.getLogger(__name__)
_ZERO_GROUPS = "advantage/zero_groups"


class SignalWatch:
    """Counts the steps without a signal; says so at the first one and at the end."""

    def __init__(self, *, n: int) -> None:
        """Groups have `n` samples."""
        self._n = n
        self._steps = 0
        self.without = 0
        """Steps in which all samples of each group scored alike."""

    def see(self, step: int, scores: Sequence[float], metrics: Mapping[str, float]) -> None:
        """Look at a step that was trained: its scores and what the policy workers measured."""
        self._steps += 1
        if metrics.get(_ZERO_GROUPS) != 1.0:
            return
        self.without += 1
        if self.without > 1:
            return
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        rewards = f"every reward is {low:.3f}" if low == high else f"rewards from {low:.3f} to {high:.3f}"
        _log.warning(
            "step %d has nothing to learn from: within each group all samples scored alike (%s); look at some answers "
            "in samples.jsonl: prompts may be too hard or too easy, the reward function may not tell answers apart, or "
            "actor_rollout_ref.rollout.n=%d may be too few samples to differ",
            step,
            rewards,
            self._n,
        )

    def end(self) -> None:
        """Say how many steps it was, if any."""
        if self.without:
            _log.warning("%d of %d steps had nothing to learn from (%s=1)", self.without, self._steps, _ZERO_GROUPS)
