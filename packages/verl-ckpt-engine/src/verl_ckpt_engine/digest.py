"""Digests of what was moved, so that "sent" and "arrived" can be compared.

Owns the one hash of this package. It is full and position-dependent: a flipped byte, two swapped elements or a shifted
payload all change it, which a sum over the payload would not notice. XXH3 reads about twice as fast as memory copies,
so hashing everything costs less than deciding what to sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.weights import Manifest

__all__ = ["PayloadHasher", "combined_digest", "payload_hasher"]


class PayloadHasher(Protocol):
    """Hashes one payload, piece by piece; where it is cut does not matter."""

    def update(self, data: memoryview, /) -> None:
        """Append `data`, which must be contiguous."""
        ...

    def intdigest(self) -> int:
        """Return the hash of everything so far, in [0, 2**64)."""
        ...


def payload_hasher() -> PayloadHasher:
    """Return a hasher of nothing yet."""
    return xxhash.xxh3_64()


def combined_digest(manifest: Manifest, digests: Mapping[str, int]) -> str:
    """Hash names, shapes, dtypes and payloads of a whole manifest into 32 hexadecimal digits.

    The version is left out: equal weights have equal digests. Raises KeyError for a tensor without a digest.
    """
    hasher = xxhash.xxh3_128()
    for meta in manifest.tensors:
        hasher.update(f"{meta.name}\0{meta.dtype}\0{meta.shape}\0{digests[meta.name]}\n".encode())
    return hasher.hexdigest()
