"""Where a weight receiver writes: straight into the live parameters, checked for names, shapes and completeness."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_contracts.errors import WeightSyncError
from verl_contracts.weights import LoadReport
from verl_rollout.engine.torch.checkpoint import named_tensors, some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from verl_contracts.weights import TensorMeta, WeightTarget

__all__ = ["ModelTarget"]


class ModelTarget:
    """Loads canonical tensors into a model. The model must be at rest: `guard` raises `StateError` unless it is.

    Tied parameters need to arrive once, under either name; the second one is skipped. Persistent buffers may arrive.
    """

    def __init__(self, model: torch.nn.Module, *, guard: Callable[[], None], loaded: Callable[[bool], None]) -> None:
        self._model = model
        self._guard = guard
        self._loaded = loaded

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Copy each tensor in. Raises `WeightSyncError` for unknown, repeated, misshapen or missing names."""
        self._guard()
        self._loaded(False)
        known = named_tensors(self._model)
        seen: set[str] = set()
        filled: set[int] = set()
        loaded: list[str] = []
        skipped: list[str] = []
        with torch.no_grad():
            for meta, tensor in items:
                target = known.get(meta.name)
                if target is None:
                    raise _error(f"the model has no such tensor; it has {some(known)}", meta.name)
                if meta.name in seen:
                    raise _error("it arrived twice", meta.name)
                seen.add(meta.name)
                if target.shape != tensor.shape:
                    raise _error(f"shape {tuple(tensor.shape)} arrived, the model has {tuple(target.shape)}", meta.name)
                if id(target) in filled:
                    skipped.append(meta.name)
                    continue
                target.copy_(tensor)
                filled.add(id(target))
                loaded.append(meta.name)
        parameters = dict(self._model.named_parameters())
        missing = [name for name, parameter in parameters.items() if id(parameter) not in filled]
        if missing:
            raise _error(f"{len(missing)} of {len(parameters)} tensors did not arrive: {some(missing)}", None)
        self._loaded(True)
        return LoadReport(loaded=tuple(loaded), skipped=tuple(skipped))


def _error(reason: str, tensor: str | None) -> WeightSyncError:
    return WeightSyncError("transfer", reason, tensor)


if TYPE_CHECKING:

    def _is_target(x: ModelTarget) -> WeightTarget:
        return x
