"""The kit's suite against the shm backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ckpt_engine.shm import ShmBackend
from verl_contracts.testing.suites.weights import WeightBackendSuite

if TYPE_CHECKING:
    from verl_contracts.weights import WeightBackend


class TestShmBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return ShmBackend
