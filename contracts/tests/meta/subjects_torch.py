"""The subjects that need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from references_torch import Centred, Clipped

from verl_contracts.testing.memory import MemoryBackend
from verl_contracts.testing.suites.training import AdvantageEstimatorSuite, PolicyLossSuite
from verl_contracts.testing.suites.weights import WeightBackendSuite

if TYPE_CHECKING:
    from verl_contracts.training import AdvantageEstimator, PolicyLoss
    from verl_contracts.weights import WeightBackend


class EstimatorSubject(AdvantageEstimatorSuite):
    kind = Centred

    def estimator(self) -> AdvantageEstimator:
        return self.kind()


class LossSubject(PolicyLossSuite):
    kind = Clipped

    def loss(self) -> PolicyLoss:
        return self.kind()


class BackendSubject(WeightBackendSuite):
    kind = MemoryBackend
    processes = False

    def backend(self) -> type[WeightBackend]:
        return self.kind
