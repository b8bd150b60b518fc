"""The kit's suites against the backends that need torch alone, and the manager."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

from verl_ckpt_engine.gloo import GlooBackend
from verl_ckpt_engine.manager import TransactionalManager
from verl_ckpt_engine.naive import NaiveBackend, NaiveReceiver, NaiveSender
from verl_ckpt_engine.shm import ShmBackend
from verl_contracts.clock import SystemClock
from verl_contracts.errors import ConfigError
from verl_contracts.events import NullEvents
from verl_contracts.testing.suites.checkpoint import CheckpointEngineManagerSuite
from verl_contracts.testing.suites.weights import WeightBackendSuite
from verl_contracts.weights import Manifest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Replica
    from verl_contracts.weights import CheckpointEngineManager, CheckpointSettings, WeightBackend, WeightSenderHost


class TestShmBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return ShmBackend


class TestTransactionalManager(CheckpointEngineManagerSuite):
    def create(
        self, settings: CheckpointSettings, *, sender: WeightSenderHost, replicas: Sequence[Replica], clock: Clock
    ) -> Awaitable[CheckpointEngineManager]:
        return TransactionalManager.create(settings, sender=sender, replicas=replicas, clock=clock, events=NullEvents())


class TestGlooBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return GlooBackend


class TestNaiveBackend(WeightBackendSuite):
    processes: ClassVar[bool] = False

    def backend(self) -> type[WeightBackend]:
        return NaiveBackend


def test_naive_refuses_a_rank_of_another_process() -> None:
    manifest = Manifest(version=1, tensors=(), num_bytes=0)
    clock = SystemClock()
    sender = NaiveSender(owner="trainer", rank=0, clock=clock)
    receiver = NaiveReceiver(owner="replica-0", clock=clock)
    try:
        here = sender.prepare(manifest, session="s")
        beside = receiver.prepare(session="s", rank=0)
        far = replace(beside, address={**beside.address, "process": "another"})
        planner = NaiveBackend.planner_class()
        plan = planner.plan(manifest, session="s", senders=[here], receivers=[beside], bucket_bytes=64)
        assert plan.receivers == (beside,)
        with pytest.raises(ConfigError, match=r"replica-0 rank 0 is not in that of trainer rank 0: .* shm or gloo"):
            planner.plan(manifest, session="s", senders=[here], receivers=[far], bucket_bytes=64)
    finally:
        sender.close()
        receiver.close()
