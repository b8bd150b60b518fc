"""Digests of what was moved, so that "sent" and "arrived" can be compared.

Owns the hashes of this package, all of them position-dependent: two swapped elements or a shifted payload change them,
which a sum over the payload would not notice. A full one notices every flipped bit. A sampled one reads a window of
each stretch of a large tensor, for backends whose speed is bound by the same cores: it notices wrong, old, shifted and
half-written tensors, and most probably not a single bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.weights import Manifest, Verification

__all__ = ["STRETCH", "WINDOW", "PayloadHasher", "combined_digest", "payload_hasher"]

WINDOW: Final = 4 * 1024
"""Bytes that a sampled digest reads at the beginning of each stretch."""
STRETCH: Final = 128 * 1024
"""Bytes of a stretch. A tensor of at most one is read in full, and so are the last `WINDOW` bytes of any."""


class PayloadHasher(Protocol):
    """Hashes one payload, piece by piece; where it is cut does not matter."""

    def update(self, data: memoryview, /) -> None:
        """Append `data`, which must be contiguous."""
        ...

    def intdigest(self) -> int:
        """Return the hash of everything so far, in [0, 2**64)."""
        ...


class _Sampling:
    """Hashes the windows of a payload of known length."""

    def __init__(self, num_bytes: int) -> None:
        self._hasher = xxhash.xxh3_64(str(num_bytes).encode())
        self._tail = max(0, num_bytes - WINDOW)
        self._at = 0

    def update(self, data: memoryview, /) -> None:
        begin, end = self._at, self._at + len(data)
        for stretch in range(begin // STRETCH * STRETCH, end, STRETCH):
            self._read(data, stretch, min(stretch + WINDOW, self._tail))
        self._read(data, self._tail, end)
        self._at = end

    def _read(self, data: memoryview, start: int, stop: int) -> None:
        """Hash what `data` has of the payload from `start` to `stop`."""
        first, last = max(start - self._at, 0), min(stop - self._at, len(data))
        if first < last:
            self._hasher.update(data[first:last])

    def intdigest(self) -> int:
        return self._hasher.intdigest()


def payload_hasher(num_bytes: int, verification: Verification) -> PayloadHasher:
    """Return a hasher for a payload of `num_bytes`."""
    if verification == "full" or num_bytes <= STRETCH:
        return xxhash.xxh3_64()
    return _Sampling(num_bytes)


def combined_digest(manifest: Manifest, digests: Mapping[str, int]) -> str:
    """Hash names, shapes, dtypes and payloads of a whole manifest into 32 hexadecimal digits.

    The version is left out: equal weights have equal digests. Raises KeyError for a tensor without a digest.
    """
    hasher = xxhash.xxh3_128()
    for meta in manifest.tensors:
        hasher.update(f"{meta.name}\0{meta.dtype}\0{meta.shape}\0{digests[meta.name]}\n".encode())
    return hasher.hexdigest()
