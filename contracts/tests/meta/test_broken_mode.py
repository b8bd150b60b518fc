"""The suite of trainer modes accepts the shortest mode that meets the contract, and rejects each that breaks a rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from broken import Broken, name_of, reject

from verl_contracts.errors import ConfigError
from verl_contracts.testing.suites.mode import TrainerModeSuite
from verl_contracts.training import ModePlan, Placement, Schedule, ScheduleRequest, TrainerMode


class Shared:
    """Replicas on the trainer's devices."""

    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        if rollout_devices:
            raise ConfigError(f"actor_rollout_ref.rollout.n_gpus_per_node={rollout_devices}: replicas share devices")
        try:
            schedule = Schedule(
                max_staleness=request.max_staleness or 0,
                sync_every=request.sync_every or 1,
                pause_mode=request.pause_mode or "wait",
                sleep_while_training=bool(request.sleep_while_training),
            )
        except ValueError as exc:
            raise ConfigError(f"async_training: {exc}") from exc
        return ModePlan(placement=Placement(trainer_devices=trainer_devices, hybrid=True), schedule=schedule)


class SharedSubject(TrainerModeSuite):
    kind = Shared

    def mode(self) -> TrainerMode:
        return self.kind()


class TestShared(SharedSubject):
    pass


class RefusesEverything(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        raise ConfigError("async_training: not today")


class KnowsBetter(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        return super().plan(
            trainer_devices=trainer_devices, rollout_devices=rollout_devices, request=replace(request, sync_every=1)
        )


class IgnoresDevices(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        return super().plan(trainer_devices=trainer_devices, rollout_devices=None, request=request)


class LetsValueErrorsOut(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        try:
            return super().plan(trainer_devices=trainer_devices, rollout_devices=rollout_devices, request=request)
        except ConfigError as exc:
            raise ValueError("bad") from exc


class NamesNoKey(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        try:
            return super().plan(trainer_devices=trainer_devices, rollout_devices=rollout_devices, request=request)
        except ConfigError as exc:
            raise ConfigError("this mode cannot do that") from exc


class PlacesReplicasNowhere(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        plan = super().plan(trainer_devices=trainer_devices, rollout_devices=rollout_devices, request=request)
        return replace(plan, placement=replace(plan.placement, hybrid=False))


class SleepsOnItsOwnDevices(Shared):
    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        plan = super().plan(trainer_devices=trainer_devices, rollout_devices=None, request=request)
        placement = Placement(trainer_devices=trainer_devices, hybrid=False, standalone_devices=rollout_devices or 1)
        return replace(plan, placement=placement)


class Remembers(Shared):
    seen = 0

    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        Remembers.seen += 1
        plan = super().plan(trainer_devices=trainer_devices, rollout_devices=rollout_devices, request=request)
        if request.max_staleness is None and plan.schedule.sync_every == 1:
            return replace(plan, schedule=replace(plan.schedule, max_staleness=Remembers.seen))
        return plan


MODES = [
    Broken(kind=RefusesEverything, test="test_asking_for_nothing_is_accepted", says="not today"),
    Broken(kind=KnowsBetter, test="test_what_was_asked_is_in_the_plan", says="changed silently"),
    Broken(kind=IgnoresDevices, test="test_devices_are_those_asked_for", says="AssertionError"),
    Broken(
        kind=LetsValueErrorsOut,
        test="test_refusals_are_config_errors_that_begin_with_the_key",
        says="refused with ConfigError, got ValueError",
    ),
    Broken(
        kind=NamesNoKey, test="test_refusals_are_config_errors_that_begin_with_the_key", says="the refusal names no key"
    ),
    Broken(
        kind=PlacesReplicasNowhere,
        test="test_replicas_have_devices_and_only_those_that_share_them_sleep",
        says="AssertionError",
    ),
    Broken(
        kind=SleepsOnItsOwnDevices,
        test="test_replicas_have_devices_and_only_those_that_share_them_sleep",
        says="standalone replicas generate while the trainer trains",
    ),
    Broken(kind=Remembers, test="test_plan_is_pure", says="AssertionError"),
]


@pytest.mark.parametrize("row", MODES, ids=name_of)
def test_broken_mode_is_rejected(row: Broken) -> None:
    reject(SharedSubject, row)
