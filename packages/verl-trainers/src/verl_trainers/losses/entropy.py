"""Entropy of the policy at a position, for the bonus that keeps it exploring."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["entropy"]


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Return [N] the entropy in nats of distributions given as normalized log-probabilities [N, V]."""
    return -(log_probs.exp() * log_probs).sum(dim=-1)
