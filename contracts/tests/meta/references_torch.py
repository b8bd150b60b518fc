"""The references that need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_contracts.training import PolicyLossOutput

if TYPE_CHECKING:
    from verl_contracts.training import (
        AdvantageEstimator,
        AdvantageInputs,
        LossAggregation,
        PolicyLoss,
        PolicyLossInputs,
    )

torch.set_num_threads(1)


class Centred:
    """Score minus the mean of its group."""

    def estimate(self, inputs: AdvantageInputs, /) -> torch.Tensor:
        result = torch.zeros_like(inputs.mask)
        for group in set(inputs.groups.tolist()):
            rows = inputs.groups == group
            scores = inputs.scores[rows].double()
            equal = bool((scores == scores[0]).all())
            centred = torch.zeros_like(scores) if equal else scores - scores.mean()
            result[rows] = centred.float().unsqueeze(1) * inputs.mask[rows]
        return result


class Clipped:
    """PPO's clipped ratio."""

    @property
    def aggregation(self) -> LossAggregation:
        return "token-mean"

    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        losses = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        return PolicyLossOutput(losses=losses, metrics={"clipped": (ratio != clipped).float()})


if TYPE_CHECKING:

    def _is_estimator(x: Centred) -> AdvantageEstimator:
        return x

    def _is_loss(x: Clipped) -> PolicyLoss:
        return x
