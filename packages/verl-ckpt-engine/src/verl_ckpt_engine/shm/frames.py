"""What one frame of the stream says: a table of records, then the payload they point into.

Owns the wire format. Each record repeats name, dtype and shape, so that a reader checks what it got against the
manifest instead of trusting that both sides count alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from verl_contracts.weights import WireFormat

__all__ = [
    "ALIGNMENT",
    "DATA_FRAME",
    "END_FRAME",
    "WIRE_FORMAT",
    "EndRecord",
    "Record",
    "aligned",
    "decode_end",
    "decode_table",
    "encode_end",
    "encode_record",
    "encode_table",
]

WIRE_FORMAT = WireFormat(format_id="verl-frames", version=1)

DATA_FRAME = 1
END_FRAME = 2

ALIGNMENT = 64
"""Every payload begins at a multiple of this, so that it can be viewed in any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One tensor, or one piece of a tensor that is larger than a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: int
    """Where in the tensor's bytes the piece begins."""
    num_bytes: int
    at: int
    """Where in the frame's payload the piece begins."""
    digest: int | None
    """Digest of the whole tensor; None in all pieces but the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """What the sender claims to have sent."""

    tensors: int
    num_bytes: int
    digest: str
    """Combined digest over the manifest."""


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """Return `size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def encode_record(record: Record) -> bytes:
    """Return `record` as one JSON array."""
    row = [
        record.name,
        record.dtype,
        record.shape,
        record.offset,
        record.num_bytes,
        record.at,
        record.digest,
    ]
    return json.dumps(row, separators=(",", ":")).encode()


def encode_table(records: list[bytes]) -> bytes:
    """Join encoded records."""
    return b"[" + b",".join(records) + b"]"


def decode_table(data: bytes) -> list[Record]:
    """Return the records of a data frame. Raises ValueError when it is not one."""
    rows = json.loads(data)
    return [
        Record(name=name, dtype=dtype, shape=tuple(shape), offset=offset, num_bytes=num_bytes, at=at, digest=digest)
        for name, dtype, shape, offset, num_bytes, at, digest in rows
    ]


def encode_end(end: EndRecord) -> bytes:
    """Return the table of an end frame."""
    return json.dumps([end.tensors, end.num_bytes, end.digest]).encode()


def decode_end(data: bytes) -> EndRecord:
    """Return what an end frame says. Raises ValueError when it is not one."""
    tensors, num_bytes, digest = json.loads(data)
    return EndRecord(tensors=tensors, num_bytes=num_bytes, digest=digest)
