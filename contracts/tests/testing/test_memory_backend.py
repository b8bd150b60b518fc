from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.testing.memory import MemoryBackend
from verl_contracts.testing.suites.weights import WeightBackendSuite

if TYPE_CHECKING:
    from verl_contracts.weights import WeightBackend


class TestMemoryBackend(WeightBackendSuite):
    processes = False

    def backend(self) -> type[WeightBackend]:
        return MemoryBackend
