"""The trainer's weights as a stream of canonical tensors, gathered one at a time.

Owns names, order and wire type. Parameters that are one tensor under several names go out once, under the embedding's
name. A transfer that a rank leaves half-way would block the others in a gather for ever; `OnePass` lets it finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from verl_contracts.errors import StateError
from verl_contracts.weights import Manifest, TensorMeta
from verl_trainers.workers.names import canonical_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from transformers import PreTrainedModel

    from verl_contracts.weights import WeightSource

__all__ = ["OnePass", "PolicyWeights", "canonical_tensors"]


def canonical_tensors(
    model: PreTrainedModel, master_of: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return canonical name → master weight or saved buffer of `model`, each tensor once, in order.

    A tensor with several names goes by that of the embedding, or else by its first.
    """
    embedding = model.get_input_embeddings()
    inside = [f"{name}." for name, module in model.named_modules() if module is embedding]
    owners: dict[int, list[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
        tensors[name] = master_of(parameter)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            owners.setdefault(id(buffer), []).append(name)
            tensors[name] = buffer
    chosen = [next((n for n in names if n.startswith(tuple(inside))), names[0]) for names in owners.values()]
    return {canonical: tensors[name] for name, canonical in canonical_names(chosen).items()}


class PolicyWeights:
    """Tensors of one policy in `dtype`. Reads them when iterated, so it always shows the present weights."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype) -> None:
        """`tensors` maps canonical name → tensor, sharded or not; all ranks pass the same names in the same order."""
        self._tensors = dict(tensors)
        self._dtype = dtype
        self._metas = tuple(
            TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(self._wire(tensor)).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        )

    def manifest(self, version: int, /) -> Manifest:
        """Return names, shapes and dtypes in the order of `tensors`."""
        num_bytes = sum(tensor.numel() * self._wire(tensor).itemsize for tensor in self._tensors.values())
        return Manifest(version=version, tensors=self._metas, num_bytes=num_bytes)

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor, complete on every rank until the next one is asked for."""
        for meta in self._metas:
            held = self._tensors[meta.name].detach()
            tensor = held.to(self._wire(held))
            yield meta, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _wire(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the type that goes out; whole numbers keep theirs."""
        return self._dtype if tensor.is_floating_point() else tensor.dtype


class OnePass:
    """A source whose tensors are taken once, and whose rest can be gathered when the taker gave up."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._rest = source.tensors()
        self._taken = False

    def manifest(self, version: int, /) -> Manifest:
        """Return what the source says."""
        return self._source.manifest(version)

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor. Raises `StateError` the second time: each pass is a gather that all ranks must join."""
        if self._taken:
            raise StateError("the weights of one transfer can be read once only")
        self._taken = True
        for meta, tensor in self._rest:  # noqa: UP028  # closing this generator must leave the rest open
            yield meta, tensor

    def finish(self) -> None:
        """Gather whatever was not taken, so that the other ranks come to their end."""
        for _ in self._rest:
            pass


if TYPE_CHECKING:

    def _is_source(x: PolicyWeights) -> WeightSource:
        return x

    def _is_source_too(x: OnePass) -> WeightSource:
        return x
