"""Copying a tensor's elements into memory that is shared or sent, and hashing what arrived there."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from verl_ckpt_engine.digest import PayloadHasher

__all__ = ["bytes_of", "copy_and_hash"]

_STEP_BYTES: Final = 512 * 1024
"""Bytes copied before they are hashed, while the cache still holds them."""


def copy_and_hash(tensor: torch.Tensor, into: torch.Tensor, data: memoryview | None, hasher: PayloadHasher) -> None:
    """Copy `tensor`, of any strides, row by row to `into`, as many bytes, and hash them.

    `data` are the same bytes as a memoryview where this process can have one, None for memory of a device.
    """
    if not into.numel():
        return
    dense = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if data is None or not dense:
        into.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        hasher.update(bytes_of(into) if data is None else data)
        return
    # Plain memory copies take about three quarters of the time of torch's; like those, they release the GIL.
    source, target = tensor.data_ptr(), into.data_ptr()
    for first in range(0, len(data), _STEP_BYTES):
        size = min(_STEP_BYTES, len(data) - first)
        ctypes.memmove(target + first, source + first, size)
        hasher.update(data[first : first + size])


def bytes_of(memory: torch.Tensor) -> memoryview:
    """Return bytes, a contiguous tensor of uint8, as a memoryview: the same memory, or a copy from a device."""
    return memoryview(memory.cpu().numpy())  # type: ignore[arg-type]  # before Python 3.12 it is a buffer all the same
