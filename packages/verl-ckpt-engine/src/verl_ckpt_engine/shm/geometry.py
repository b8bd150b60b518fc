"""Where things lie in the ring: sizes and places, computed from the plan.

Owns how much memory a sync takes. Frames are announced in a ring of pages. Payload lies in areas: many small ones,
which stay in the cache and let either side run ahead, and two large ones, each for one tensor that is written piece by
piece and handed to the engine whole, so that no reader has to put it together in memory of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ckpt_engine.planner import MOST_RECEIVERS
from verl_ckpt_engine.shm.frames import ALIGNMENT, FRAME_BYTES, aligned
from verl_ckpt_engine.shm.memory import PAGE
from verl_ckpt_engine.tally import size_of

if TYPE_CHECKING:
    from verl_contracts.weights import Manifest

__all__ = ["DROPPED_AT", "FRAMES", "HEADER_BYTES", "Geometry"]

SMALL_BYTES = 2 * 1024 * 1024
SMALL_AREAS = 6
FRAMES = 32
"""Frames that can be announced and not yet read."""
DROPPED_AT = PAGE
"""Where the words begin that tell readers that they were dropped, one each."""
HEADER_BYTES = PAGE + MOST_RECEIVERS * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of the ring for one sync."""

    piece_bytes: int
    """Most payload in one piece."""
    small_bytes: int
    """Size of each small area; longer tensors go to a large one, in pieces."""
    large_bytes: tuple[int, int]
    """Sizes of the large areas: one takes the largest tensor, the other the second largest that fits into a bucket."""

    @classmethod
    def choose(cls, manifest: Manifest, *, bucket_bytes: int) -> Geometry:
        """Return a ring for pieces of at most `bucket_bytes`, smaller when all tensors together need less."""
        sizes = sorted((size_of(meta) for meta in manifest.tensors), reverse=True)
        bucket = aligned(max(1, min(bucket_bytes, manifest.num_bytes + ALIGNMENT * len(sizes))))
        small = min(bucket, SMALL_BYTES)
        large = [aligned(size, PAGE) for size in sizes if size > small]
        other = next((size for size in large[1:] if size <= bucket), 0)
        return cls(piece_bytes=small, small_bytes=small, large_bytes=(large[0] if large else 0, other))

    @property
    def small_at(self) -> list[int]:
        """Where in the ring each small area begins."""
        stride = aligned(self.small_bytes, PAGE)
        return [self._areas_at + index * stride for index in range(SMALL_AREAS)]

    @property
    def large_at(self) -> tuple[int, int]:
        """Where in the ring each large area begins."""
        first = self._areas_at + SMALL_AREAS * aligned(self.small_bytes, PAGE)
        return first, first + self.large_bytes[0]

    @property
    def total_bytes(self) -> int:
        """Size of the ring."""
        return self.large_at[1] + self.large_bytes[1]

    @property
    def _areas_at(self) -> int:
        return aligned(HEADER_BYTES, PAGE) + FRAMES * FRAME_BYTES
