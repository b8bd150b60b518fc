"""Log-prob and entropy of tokens from logits, a few rows at a time in both directions.

A vocabulary is wide: a softmax over all rows at once makes several float32 copies of logits that are hundreds of
megabytes already, and pages touched for the first time cost more than the arithmetic. Here only the logits are kept;
the softmax is made again, block by block, for the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_trainers.losses.entropy import entropy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.autograd.function import FunctionCtx

__all__ = ["token_log_probs"]

_BLOCK_ELEMENTS = 1 << 22
"""Most elements of one block: 16 MiB in float32, which allocators keep instead of giving back to the system."""


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob of `tokens` and entropy, both [N] in float32 or wider; both carry gradients.

    Args:
        logits: [N, V], of any floating type.
        tokens: [N] int64.
        temperature: What the logits are divided by, > 0.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogProbs.apply(logits, tokens, temperature)  # type: ignore[no-untyped-call]
    return result


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: torch.Tensor, tokens: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.promote_types(logits.dtype, torch.float32)
        picked = torch.empty(len(tokens), dtype=kind, device=logits.device)
        bits = torch.empty_like(picked)
        for rows in _blocks(logits):
            distributions = _distributions(logits[rows], temperature)
            picked[rows] = distributions.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
            bits[rows] = entropy(distributions)
        ctx.save_for_backward(logits, tokens, bits)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        return picked, bits

    @staticmethod
    def backward(
        ctx: FunctionCtx, picked_gradient: torch.Tensor, bits_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        """With p the softmax: d log p_i / d z_j = (i = j) - p_j, and d H / d z_j = -p_j (log p_j + H)."""
        logits, tokens, bits = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            distributions = _distributions(logits[rows], temperature)
            weight = (
                distributions.add(bits[rows, None]).mul_(bits_gradient[rows, None]).add_(picked_gradient[rows, None])
            )
            block = distributions.exp_().mul_(weight).neg_()
            block.scatter_add_(1, tokens[rows, None], picked_gradient[rows, None])
            gradient[rows] = block.div_(temperature)
        return gradient, None, None


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def _distributions(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(wide if temperature == 1.0 else wide / temperature, dim=-1)
