# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of `TrainerMode`: a plan honours what was asked, or is refused by the key that it cannot honour."""

from __future__ import annotations

import abc
import itertools
from typing import TYPE_CHECKING

import pytest

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import check_plugin, families
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.training import ModePlan, ScheduleRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_contracts.rollout import PauseMode
    from verl_contracts.training import TrainerMode

__all__ = ["TrainerModeSuite"]

KEYS = (
    "async_training",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.free_cache_engine",
    "trainer.n_gpus_per_node",
)
"""Keys that the arguments of `plan` come from; a refusal begins with one, or with a key below it."""


class TrainerModeSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `mode`."""

    @abc.abstractmethod
    def mode(self) -> TrainerMode:
        """Return the mode."""

    def cases(self) -> Iterator[tuple[int, int | None, ScheduleRequest]]:
        """Yield every combination of what may be asked: trainer devices, rollout devices, schedule."""
        pauses: tuple[PauseMode | None, ...] = (None, "wait", "abort", "keep")
        for devices, rollout, staleness, every, pause, sleep in itertools.product(
            (1, 4), (None, 0, 1, 3), (None, 0, 1, 5), (None, 1, 2, 6), pauses, (None, False, True)
        ):
            yield (
                devices,
                rollout,
                ScheduleRequest(
                    max_staleness=staleness, sync_every=every, pause_mode=pause, sleep_while_training=sleep
                ),
            )

    def plans(self) -> Iterator[tuple[int, int | None, ScheduleRequest, ModePlan | ConfigError]]:
        """Yield each case with the plan or the refusal."""
        mode = self.mode()
        for devices, rollout, request in self.cases():
            try:
                answer: ModePlan | ConfigError = mode.plan(
                    trainer_devices=devices, rollout_devices=rollout, request=request
                )
            except ConfigError as exc:
                answer = exc
            except Exception as exc:
                pytest.fail(f"{request} must be refused with ConfigError, got {type(exc).__name__}: {exc}")
            yield devices, rollout, request, answer

    def accepted(self) -> Iterator[tuple[int, int | None, ScheduleRequest, ModePlan]]:
        """Yield the cases that the mode accepts, with its plan."""
        for devices, rollout, request, answer in self.plans():
            if isinstance(answer, ModePlan):
                yield devices, rollout, request, answer

    def test_class_meets_the_contract(self) -> None:
        check_plugin(families.TRAINER_MODE, type(self.mode()), key="trainer.mode")

    def test_asking_for_nothing_is_accepted(self) -> None:
        plan = self.mode().plan(trainer_devices=1, rollout_devices=None, request=ScheduleRequest())
        assert plan.placement.trainer_devices == 1

    def test_refusals_are_config_errors_that_begin_with_the_key(self) -> None:
        for _, rollout, request, answer in self.plans():
            if isinstance(answer, ConfigError):
                assert str(answer).startswith(KEYS), f"{rollout}, {request}: the refusal names no key: {answer}"

    def test_what_was_asked_is_in_the_plan(self) -> None:
        for _, _, request, plan in self.accepted():
            schedule = plan.schedule
            pairs = {
                "max_staleness": (request.max_staleness, schedule.max_staleness),
                "sync_every": (request.sync_every, schedule.sync_every),
                "pause_mode": (request.pause_mode, schedule.pause_mode),
                "sleep_while_training": (request.sleep_while_training, schedule.sleep_while_training),
            }
            changed = {name: pair for name, pair in pairs.items() if pair[0] is not None and pair[0] != pair[1]}
            assert not changed, f"asked for and changed silently (asked, planned): {changed}"

    def test_devices_are_those_asked_for(self) -> None:
        for devices, rollout, request, plan in self.accepted():
            assert plan.placement.trainer_devices == devices, request
            if rollout is not None:
                assert plan.placement.standalone_devices == rollout, (rollout, request)

    def test_replicas_have_devices_and_only_those_that_share_them_sleep(self) -> None:
        for _, rollout, request, plan in self.accepted():
            placement = plan.placement
            assert placement.hybrid or placement.standalone_devices > 0, (rollout, request)
            if plan.schedule.sleep_while_training:
                assert placement.hybrid, f"standalone replicas generate while the trainer trains: {request}"

    def test_plan_is_pure(self) -> None:
        assert list(self.accepted()) == list(self.accepted())
