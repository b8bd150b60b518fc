"""How token losses become one number whose gradient does not depend on how the work was cut.

Owns the denominators. They are counted once over everything that one update trains on, then passed to each micro-batch
of each rank, so that partial sums simply add up. The failure this prevents: means of means, which weigh a token by the
micro-batch that it happened to land in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl_contracts.training import LossAggregation

__all__ = ["Counts", "aggregate", "count", "masked_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one update trains on, over all ranks and micro-batches."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences with at least one trained token."""


def count(mask: torch.Tensor) -> Counts:
    """Return the counts of a mask [B, T]; rows without a trained token count as nothing."""
    per_row = mask.sum(dim=1)
    return Counts(tokens=float(per_row.sum()), sequences=float((per_row > 0).sum()))


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` where `mask` is 1; what lies elsewhere may be anything, infinities included."""
    return torch.where(mask > 0, values, 0.0).sum()


def aggregate(losses: torch.Tensor, mask: torch.Tensor, mode: LossAggregation, counts: Counts) -> torch.Tensor:
    """Return this part's share of the loss: the shares of all parts add up to the loss of the whole.

    Args:
        losses: [B, T], of any rows of the update.
        mask: [B, T], 1 at trained positions.
        mode: What one number means; see `verl_contracts.training.LossAggregation`.
        counts: Of the whole update.
    """
    if mode == "token-mean":
        return masked_sum(losses, mask) / max(counts.tokens, 1.0)
    if mode == "seq-mean-token-sum":
        return masked_sum(losses, mask) / max(counts.sequences, 1.0)
    own = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    return masked_sum(losses / own, mask) / max(counts.sequences, 1.0)
