"""Group-relative advantages: a sample is judged against the others that answered the same prompt.

Owns what happens to degenerate groups: a group of one and a group of equal scores say nothing about the policy, so
their advantages are exactly 0 and never a rounding error blown up by a division.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_contracts.errors import ConfigError, DataError

if TYPE_CHECKING:
    from verl_contracts.training import AdvantageEstimator, AdvantageInputs

__all__ = ["GroupRelative"]


class GroupRelative:
    """Score minus the mean of its group, optionally over the group's standard deviation.

    With the deviation (n - 1 in its denominator) this is GRPO, "DeepSeekMath", arXiv 2402.03300, section 4.1.2. Without
    it, it is Dr. GRPO, "Understanding R1-Zero-Like Training", arXiv 2503.20783: dividing by the deviation favours
    prompts that are nearly always or nearly never answered right. Groups are told apart by number, whatever the order
    of the rows.
    """

    def __init__(self, *, norm_by_std: bool = True, epsilon: float = 1e-6) -> None:
        if epsilon <= 0.0:
            raise ConfigError(f"epsilon must be > 0, got {epsilon}; it keeps a tiny deviation from exploding")
        self._norm_by_std = norm_by_std
        self._epsilon = epsilon

    def estimate(self, inputs: AdvantageInputs, /) -> torch.Tensor:
        """Return [B, T] float32, one value per row at its trained positions, 0 elsewhere."""
        scores = inputs.scores.double()
        if not bool(torch.isfinite(scores).all()):
            rows = torch.nonzero(~torch.isfinite(scores)).flatten().tolist()
            raise DataError(f"scores must be finite; rows {rows[:10]} are not. A failed reward is no score: drop it")
        _, group = torch.unique(inputs.groups, return_inverse=True)
        blank = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=scores.dtype, device=scores.device)
        size = blank.index_add(0, group, torch.ones_like(scores))
        mean = blank.index_add(0, group, scores) / size
        centred = scores - mean[group]
        highest = blank.scatter_reduce(0, group, scores, "amax", include_self=False)
        lowest = blank.scatter_reduce(0, group, scores, "amin", include_self=False)
        if self._norm_by_std:
            variance = blank.index_add(0, group, centred.square()) / (size - 1).clamp(min=1)
            centred = centred / (variance.sqrt()[group] + self._epsilon)
        centred = torch.where((highest == lowest)[group], torch.zeros_like(centred), centred)
        return centred.float().unsqueeze(1) * inputs.mask


if TYPE_CHECKING:

    def _is_estimator(x: GroupRelative) -> AdvantageEstimator:
        return x
