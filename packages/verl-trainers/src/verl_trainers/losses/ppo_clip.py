"""The clipped surrogate of PPO, with bounds of its own above and below.

Owns the ratio and its clipping. It neither aggregates nor knows where the old log-probs come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import torch

from verl_contracts.errors import ConfigError
from verl_contracts.training import LossAggregation, PolicyLossOutput
from verl_trainers.losses.kl import MAX_LOG_RATIO, kl_estimate

if TYPE_CHECKING:
    from verl_contracts.training import PolicyLoss, PolicyLossInputs

__all__ = ["PpoClip"]


class PpoClip:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), with ratio = new / old probability of the token.

    PPO, arXiv 1707.06347, eq. 7; a higher upper bound ("clip-higher") lets rare tokens grow: DAPO, arXiv 2503.14476.
    """

    def __init__(
        self,
        *,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        aggregation: LossAggregation = "token-mean",
    ) -> None:
        if not 0.0 <= clip_ratio_low < 1.0 or clip_ratio_high < 0.0:
            raise ConfigError(
                f"clip_ratio_low must be in [0, 1) and clip_ratio_high ≥ 0, got {clip_ratio_low} and {clip_ratio_high}"
            )
        if aggregation not in get_args(LossAggregation):
            raise ConfigError(f"aggregation must be one of {get_args(LossAggregation)}, got {aggregation!r}")
        self._low = 1.0 - clip_ratio_low
        self._high = 1.0 + clip_ratio_high
        self._aggregation = aggregation

    @property
    def aggregation(self) -> LossAggregation:
        """How the token losses become one number."""
        return self._aggregation

    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        """Return losses by token; logs the ratio, the share of clipped tokens and KL(old || new) by k3."""
        ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        free = ratio * inputs.advantages
        clipped = ratio.clamp(self._low, self._high) * inputs.advantages
        with torch.no_grad():
            metrics = {
                "ratio": ratio,
                "clip_share": (clipped < free).float(),
                "approx_kl": kl_estimate(inputs.old_logprobs, inputs.logprobs, "k3"),
            }
        return PolicyLossOutput(losses=-torch.minimum(free, clipped), metrics=metrics)


if TYPE_CHECKING:

    def _is_policy_loss(x: PpoClip) -> PolicyLoss:
        return x
