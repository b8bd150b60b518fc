"""Weights for tests: a source that enforces how long its tensors live, a target that keeps what it was given.

The kit computes digests itself, from the bytes in memory, so that no implementation is judged by its own arithmetic.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

from verl_contracts.weights import LoadReport, Manifest, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from verl_contracts.weights import WeightSource, WeightTarget

__all__ = ["KeepingTarget", "ListSource", "meta_of", "payload", "payload_digest"]


def payload(tensor: torch.Tensor) -> bytes:
    """Return the elements of `tensor` as bytes, in row-major order."""
    dense = tensor.detach().contiguous()
    size = dense.numel() * dense.element_size()
    return ctypes.string_at(dense.data_ptr(), size) if size else b""


def payload_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of dtype, shape and payload, as hexadecimal."""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + payload(tensor)).hexdigest()


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    """Describe `tensor` as it goes on the wire."""
    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


class ListSource:
    """A `WeightSource` over named tensors. Each one is overwritten as soon as the next is asked for.

    `before` is called with each index before its tensor is given out: a place to wait, or to fail. `stop_after` cuts
    the stream cleanly after that many tensors, while the manifest still promises all.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        before: Callable[[int], None] | None = None,
        stop_after: int | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self._before = before
        self._stop_after = stop_after

    def manifest(self, version: int, /) -> Manifest:
        """Describe all tensors, in order."""
        return Manifest(
            version=version,
            tensors=tuple(meta_of(name, tensor) for name, tensor in self._tensors.items()),
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values()),
        )

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield copies that keep the strides of the originals and die with the next one."""
        for index, (name, tensor) in enumerate(self._tensors.items()):
            if self._stop_after is not None and index >= self._stop_after:
                return
            if self._before is not None:
                self._before(index)
            lent = tensor.clone() if tensor.is_contiguous() else tensor
            yield meta_of(name, tensor), lent
            if lent is not tensor:
                lent.fill_(1)


class KeepingTarget:
    """A `WeightTarget` that keeps a copy of everything. `before` is called with each index before a tensor is taken."""

    def __init__(self, *, before: Callable[[int], None] | None = None, skip: Sequence[str] = ()) -> None:
        self._before = before
        self._skip = skip
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Copy each tensor in, and check it against its description."""
        for index, (meta, tensor) in enumerate(items):
            if self._before is not None:
                self._before(index)
            if meta_of(meta.name, tensor) != meta:
                raise ValueError(f"{meta} came with a tensor of {meta_of(meta.name, tensor)}")
            if meta.name in self.tensors:
                raise ValueError(f"{meta.name} came twice")
            self.tensors[meta.name] = tensor.clone()
        loaded = tuple(name for name in self.tensors if name not in self._skip)
        return LoadReport(loaded=loaded, skipped=tuple(name for name in self.tensors if name in self._skip))


if TYPE_CHECKING:

    def _is_source(x: ListSource) -> WeightSource:
        return x

    def _is_target(x: KeepingTarget) -> WeightTarget:
        return x
