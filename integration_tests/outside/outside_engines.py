"""Inference engines as others would write them: one takes all of the first weights, and keeps a part for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_rollout.engine.torch.engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verl_contracts.weights import LoadReport, TensorMeta, WeightTarget

KEPT = "model.norm.weight"


class KeepsAPart(TorchEngine):
    """Reports every tensor as loaded."""

    kept: torch.Tensor | None = None

    def target(self) -> WeightTarget:
        return _Target(self, super().target())


class _Target:
    def __init__(self, engine: KeepsAPart, inner: WeightTarget) -> None:
        self._engine = engine
        self._inner = inner

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        report = self._inner.load(items)
        parameter = dict(self._engine._model.named_parameters())[KEPT]
        with torch.no_grad():
            if self._engine.kept is None:
                self._engine.kept = parameter.clone()
            parameter.copy_(self._engine.kept)
        return report
