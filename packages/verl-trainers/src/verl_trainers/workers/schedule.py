"""The learning rate as a pure function of the step, so that a resumed run and every mode have the same sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_trainers.config.schema import OptimConfig

__all__ = ["learning_rate"]


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the rate of `step`, which counts from 1.

    It grows linearly from 0 (step 0, which is never made) to `lr` at step `lr_warmup_steps`, and then stays, or falls
    along half a cosine to ``lr * min_lr_ratio`` at step `total_steps`.
    """
    if step < config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(1, total_steps - config.lr_warmup_steps)
    done = min(1.0, (step - config.lr_warmup_steps) / span)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done)))
