"""AdamW on float32 master weights: gradients up, one guarded step, weights down.

Owns the guard: a loss or gradient that is not finite changes nothing, neither weights nor moments, and is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from verl_trainers.workers.model import narrow_parameters

if TYPE_CHECKING:
    from torch import nn

    from verl_trainers.config.schema import OptimConfig

__all__ = ["PolicyOptimizer", "UpdateOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping; may be infinite or NaN."""
    applied: bool
    """False when loss or gradient was not finite and nothing was changed."""


class PolicyOptimizer:
    """Master weights of `model` and their AdamW. One thread at a time.

    `accumulate` after each backward pass, then `step`. Gradients of the model are empty in between.
    """

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, grad_clip: float, compute_dtype: torch.dtype, sharded: bool
    ) -> None:
        self._working: list[torch.Tensor] = list(model.parameters())
        self._apart = not sharded and compute_dtype != torch.float32
        if self._apart:
            self._masters = [parameter.detach().clone() for parameter in self._working]
            self._gradients = [torch.zeros_like(master) for master in self._masters]
            narrow_parameters(model, compute_dtype)
            for master, gradient in zip(self._masters, self._gradients, strict=True):
                master.grad = gradient
        else:
            self._masters = list(self._working)
        self._by_parameter = {id(p): master for p, master in zip(self._working, self._masters, strict=True)}
        self._grad_clip = grad_clip
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=not sharded,
            foreach=True if sharded else None,
        )

    def master_of(self, parameter: torch.Tensor, /) -> torch.Tensor:
        """Return the master weight of one of the model's parameters."""
        return self._by_parameter[id(parameter)]

    def accumulate(self) -> None:
        """Take the model's gradients over; in float32, whatever they were computed in."""
        if not self._apart:
            return
        pairs = [(g, p.grad) for g, p in zip(self._gradients, self._working, strict=True) if p.grad is not None]
        torch._foreach_add_([g for g, _ in pairs], [grad for _, grad in pairs])
        for parameter in self._working:
            parameter.grad = None

    def step(self, learning_rate: float, *, loss: float) -> UpdateOutcome:
        """Clip and apply what was accumulated, unless it or the loss is not finite; forget it either way.

        Clipped surrogates turn a loss of NaN into a gradient of 0, so the gradient alone would not tell.
        """
        norm = _norm([master.grad for master in self._masters if master.grad is not None])
        value = float(norm)
        applied = math.isfinite(value) and math.isfinite(loss)
        if applied:
            gradients = [master.grad for master in self._masters if master.grad is not None]
            if value > self._grad_clip:
                torch._foreach_mul_(gradients, self._grad_clip / (value + 1e-6))
            for group in self._adam.param_groups:
                group["lr"] = learning_rate
            self._adam.step()
            if self._apart:
                with torch.no_grad():
                    torch._foreach_copy_(self._working, self._masters)
        self.clear()
        return UpdateOutcome(grad_norm=value, applied=applied)

    @torch.no_grad()
    def perturb(self, scale: float) -> None:
        """Change each weight by up to `scale` of itself, by chance, each rank its own part."""
        generator = torch.Generator(device=self._masters[0].device).manual_seed(0)
        for master in self._masters:
            local = master.to_local() if isinstance(master, DTensor) else master
            noise = torch.rand(local.shape, generator=generator, device=local.device, dtype=local.dtype)
            local.mul_(1.0 + scale * (2.0 * noise - 1.0))
        if self._apart:
            torch._foreach_copy_(self._working, self._masters)

    def clear(self) -> None:
        """Forget what was accumulated."""
        if self._apart:
            torch._foreach_zero_(self._gradients)
        else:
            self._adam.zero_grad(set_to_none=True)


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the global 2-norm, over all ranks."""
    total = torch.nn.utils.get_total_norm(gradients)
    return total.full_tensor() if isinstance(total, DTensor) else total
