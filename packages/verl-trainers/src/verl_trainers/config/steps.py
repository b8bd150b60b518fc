"""How many steps a run has, and what happens to the data at the end: said before anything starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_trainers.partial.rules import part_of

if TYPE_CHECKING:
    from verl_trainers.config.schema import RunConfig

__all__ = ["StepCount", "count_steps", "total_steps"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """Steps of a run, and the data that they need."""

    steps: int
    epochs: int | None
    """Passes over the data that there are; None when it is repeated as often as needed."""
    tail: int
    """Prompts at the end that no full step can be made of, and that are left out."""
    message: str
    """All of it in one line."""


def count_steps(config: RunConfig, num_rows: int) -> StepCount:
    """Return how many full steps `config` makes of `num_rows` prompts. Raises `ConfigError` when there is none."""
    batch, asked, epochs = (
        config.data.train_batch_size,
        config.trainer.total_training_steps,
        config.trainer.total_epochs,
    )
    if num_rows == 0:
        raise ConfigError("data.train_files: holds no usable row, so no step could be made")
    if asked is not None:
        needed = asked * batch
        if batch > num_rows:
            raise ConfigError(
                f"data.train_batch_size: {batch} prompts a step, and there are {num_rows}: a step would hold a prompt "
                "twice; lower it, or add data"
            )
        passes = -(-needed // num_rows)
        message = f"{asked} steps of {batch} groups need {needed} prompts: {num_rows} rows, read up to {passes} times"
        return StepCount(steps=asked, epochs=None, tail=0, message=message)
    steps, tail = divmod(epochs * num_rows, batch)
    sums = f"trainer.total_epochs * rows // data.train_batch_size = {epochs} * {num_rows} // {batch} = {steps}"
    if steps == 0:
        raise ConfigError(
            f"data.train_batch_size: no full step: {sums}; add data or epochs, lower data.train_batch_size, or set "
            "trainer.total_training_steps to read the data repeatedly"
        )
    warmup = config.actor_rollout_ref.actor.optim.lr_warmup_steps
    if warmup > steps and part_of(config) in ("whole", "train_only"):
        raise ConfigError(
            f"actor_rollout_ref.actor.optim.lr_warmup_steps: must be ≤ the number of steps ({warmup} > {steps}); "
            "otherwise the learning rate never reaches its value; for a run this short set "
            f"actor_rollout_ref.actor.optim.lr_warmup_steps={steps // 10}; {sums}"
        )
    left = f"; end of data: a tail of {tail} prompts is left out" if tail else ""
    return StepCount(steps=steps, epochs=epochs, tail=tail, message=f"{steps} full steps: {sums}{left}")


def total_steps(config: RunConfig, num_rows: int) -> int:
    """Return the number of steps, and log how it comes about. Raises `ConfigError` when there is none."""
    count = count_steps(config, num_rows)
    _log.info("%s", count.message)
    return count.steps
