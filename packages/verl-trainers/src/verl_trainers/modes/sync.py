"""`sync`: generate a batch, train on it, move the weights, and again. Nothing is ever stale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.training import ModePlan, Placement, Schedule

if TYPE_CHECKING:
    from verl_contracts.training import ScheduleRequest, TrainerMode

__all__ = ["SyncMode"]


class SyncMode:
    """Replicas share the trainer's devices; staleness is 0."""

    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        """Refuse devices for replicas alone and anything that would make a sample stale."""
        if rollout_devices not in (None, 0):
            raise ConfigError(
                f"actor_rollout_ref.rollout.n_gpus_per_node={rollout_devices}: in trainer.mode=sync replicas share the "
                "trainer's devices; leave it out, or choose trainer.mode=fully_async"
            )
        if request.max_staleness not in (None, 0):
            raise ConfigError(
                f"async_training.max_staleness={request.max_staleness}: trainer.mode=sync has staleness 0; leave it "
                "out, or choose trainer.mode=fully_async"
            )
        if request.sync_every not in (None, 1):
            raise ConfigError(
                f"async_training.sync_every={request.sync_every}: trainer.mode=sync moves weights after each step"
            )
        return ModePlan(
            placement=Placement(trainer_devices=trainer_devices, hybrid=True),
            schedule=Schedule(
                max_staleness=0,
                pause_mode=request.pause_mode or "wait",
                sleep_while_training=bool(request.sleep_while_training),
            ),
        )


if TYPE_CHECKING:

    def _is_mode(x: SyncMode) -> TrainerMode:
        return x
