"""What one frame of the stream says: a page with a header and a table of records, which point at the payload.

Owns the wire format. The tensors themselves are told by the plan, which both sides have; a record names one by its
place in the manifest. A frame says of which generation of
the ring it is, so that one left over from an earlier sync is never taken for the next one's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from verl_contracts.weights import WireFormat

__all__ = [
    "ALIGNMENT",
    "DATA_FRAME",
    "END_FRAME",
    "FRAME_BYTES",
    "HEADER",
    "MOST_RECORDS",
    "RECORD",
    "WIRE_FORMAT",
    "EndRecord",
    "Frame",
    "Record",
    "aligned",
    "decode_end",
    "encode_end",
]

WIRE_FORMAT = WireFormat(format_id="verl-frames", version=2)

DATA_FRAME = 1
END_FRAME = 2

ALIGNMENT = 64
"""Every payload begins at a multiple of this, so that it can be viewed in any dtype."""
FRAME_BYTES = 4096
HEADER = struct.Struct("=4Q")
"""Generation, sequence number, kind, number of records."""
RECORD = struct.Struct("=5Q")
MOST_RECORDS = (FRAME_BYTES - HEADER.size) // RECORD.size
"""Records that one frame holds."""
_END = struct.Struct("=QQ16s")


class Record(NamedTuple):
    """One tensor, or one piece of a tensor that goes in pieces."""

    tensor: int
    """Its place in the manifest."""
    offset: int
    """Where in the tensor's bytes the piece begins."""
    num_bytes: int
    at: int
    """Where in the ring the piece begins."""
    digest: int
    """Digest of the whole tensor in its last piece; 0 in the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame as it was read."""

    generation: int
    sequence: int
    kind: int
    table: bytes
    """The records of a data frame, or what an end frame says."""

    def records(self) -> list[Record]:
        """Return the records of a data frame."""
        return [Record._make(row) for row in RECORD.iter_unpack(self.table)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """What the sender claims to have sent."""

    tensors: int
    num_bytes: int
    digest: str
    """Combined digest over the manifest, 32 hexadecimal digits."""


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Return `size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def encode_end(end: EndRecord) -> bytes:
    """Return the table of an end frame."""
    return _END.pack(end.tensors, end.num_bytes, bytes.fromhex(end.digest))


def decode_end(table: bytes) -> EndRecord:
    """Return what an end frame says."""
    tensors, num_bytes, digest = _END.unpack_from(table)
    return EndRecord(tensors=tensors, num_bytes=num_bytes, digest=digest.hex())
