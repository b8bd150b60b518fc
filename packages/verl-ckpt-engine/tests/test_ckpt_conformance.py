"""The kit's suites against the shm backend and the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ckpt_engine.gloo import GlooBackend
from verl_ckpt_engine.manager import TransactionalManager
from verl_ckpt_engine.shm import ShmBackend
from verl_contracts.events import NullEvents
from verl_contracts.testing.suites.checkpoint import CheckpointEngineManagerSuite
from verl_contracts.testing.suites.weights import WeightBackendSuite

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
