"""`fully_async`: replicas generate all the time on devices of their own, while the trainer trains, within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.training import ModePlan, Placement, Schedule

if TYPE_CHECKING:
    from verl_contracts.training import ScheduleRequest, TrainerMode

__all__ = ["FullyAsyncMode"]

DEFAULT_STALENESS = 2


class FullyAsyncMode:
    """Standalone replicas; staleness at most k."""

    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        """Refuse zero rollout devices, sleeping, and a sync too seldom for the bound."""
        devices = 1 if rollout_devices is None else rollout_devices
        if devices < 1:
            raise ConfigError(
                f"actor_rollout_ref.rollout.n_gpus_per_node={devices}: trainer.mode=fully_async needs at least 1"
            )
        if request.sleep_while_training:
            raise ConfigError(
                "actor_rollout_ref.rollout.free_cache_engine=true: in trainer.mode=fully_async replicas generate while "
                "the trainer trains, so they cannot give their memory back"
            )
        staleness = DEFAULT_STALENESS if request.max_staleness is None else request.max_staleness
        try:
            schedule = Schedule(
                max_staleness=staleness,
                sync_every=1 if request.sync_every is None else request.sync_every,
                pause_mode=request.pause_mode or "abort",
            )
        except ValueError as exc:
            raise ConfigError(f"async_training: {exc}") from exc
        return ModePlan(
            placement=Placement(trainer_devices=trainer_devices, hybrid=False, standalone_devices=devices),
            schedule=schedule,
        )


if TYPE_CHECKING:

    def _is_mode(x: FullyAsyncMode) -> TrainerMode:
        return x
