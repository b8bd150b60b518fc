"""What is said of one bucket: its number, and which pieces of which tensors lie where in it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["SLOTS", "Frame", "Record"]

SLOTS: Final = 2
"""Buckets that a rank holds: one is filled while the other is read."""
_FRAME: Final = struct.Struct("=QQ")
_RECORD: Final = struct.Struct("=5Q")


class Record(NamedTuple):
    """One tensor, or one piece of a tensor that goes in pieces."""

    tensor: int
    """Its place in the manifest."""
    offset: int
    """Where in the tensor's bytes the piece begins."""
    num_bytes: int
    at: int
    """Where in the slot the piece begins."""
    digest: int
    """Digest of the whole tensor in its last piece; 0 in the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a parent says of one bucket."""

    sequence: int
    num_bytes: int
    records: tuple[Record, ...]

    @property
    def slot(self) -> int:
        """Which slot of either side it goes to."""
        return self.sequence % SLOTS

    def encode(self) -> bytes:
        """Return it as a message."""
        head = _FRAME.pack(self.sequence, self.num_bytes)
        return head + b"".join(_RECORD.pack(*record) for record in self.records)

    @classmethod
    def decode(cls, body: bytes) -> Frame:
        """Return what `encode` made."""
        sequence, num_bytes = _FRAME.unpack_from(body)
        records = tuple(Record._make(row) for row in _RECORD.iter_unpack(body[_FRAME.size :]))
        return cls(sequence=sequence, num_bytes=num_bytes, records=records)
