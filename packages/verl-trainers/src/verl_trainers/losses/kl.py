"""Estimates of KL(policy || reference) from one sample a position.

Source: J. Schulman, "Approximating KL Divergence", 2020. With r = reference / policy at the sampled token: k1 = -log r
is unbiased and noisy, k2 = (log r)^2 / 2 is biased and quiet, k3 = (r - 1) - log r is unbiased, quiet and never
negative. As a loss, k1 has a gradient of mean 0 under the policy's own samples: it only adds noise, and is meant for
monitoring; k2's gradient is that of the true KL.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

__all__ = ["MAX_LOG_RATIO", "KlKind", "kl_estimate"]

KlKind: TypeAlias = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before `exp`, so that one odd token cannot make a step infinite."""


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, kind: KlKind) -> torch.Tensor:
    """Return the estimate at each position, with gradients to `logprobs`."""
    log_ratio = reference - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
