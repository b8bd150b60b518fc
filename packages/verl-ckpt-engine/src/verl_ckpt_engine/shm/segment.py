"""The shared file: its name, its layout, and the words that both sides read and write.

Owns creation, growth and removal of the file. Layout: a page for the sender, a block per
reader, the announcements of frames, the areas for payload.
Every word has one writer, and is written after what it announces; that order is seen by the peers because stores stay
in order on x86-64. Elsewhere a torn frame would fail its digest, not pass.

The file is mapped directly, not through `multiprocessing.shared_memory`: its resource tracker would unlink the ring
when any one reader exits.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from verl_ckpt_engine.planner import MOST_RECEIVERS
from verl_ckpt_engine.shm.frames import ALIGNMENT, aligned
from verl_ckpt_engine.shm.waiting import ProcessId
from verl_contracts.errors import StateError

if TYPE_CHECKING:
    from verl_contracts.weights import Manifest

__all__ = [
    "ENDED",
    "FAILED",
    "FRAMES",
    "NEW",
    "READER_ABSENT",
    "READER_DONE",
    "READER_FAILED",
    "READER_JOINED",
    "READY",
    "FrameHeader",
    "Geometry",
    "Segment",
    "remove_if_orphaned",
    "segment_path",
]

PAGE = 4096
_MAGIC = 0x7665726C_77740001
_MESSAGE_AT = 512
_BLOCK = 2048
_MESSAGE_BYTES = _BLOCK - _MESSAGE_AT

NEW, READY, ENDED, FAILED = 0, 1, 2, 3
"""States of the sender."""
READER_ABSENT, READER_JOINED, READER_DONE, READER_FAILED = 0, 1, 2, 3
"""States of a reader."""

# Words of the sender's page.
_W_MAGIC, _W_STATE, _W_HEAD, _W_TABLE, _W_SMALL, _W_LARGE, _W_READERS, _W_PID, _W_STARTED, _W_LENGTH = range(10)
# Words of a reader's block. `_R_DROPPED` is the sender's; `_R_DEPARTED` is found by name, not by place.
_R_STATE, _R_CURSOR, _R_LENGTH = range(3)
_R_DROPPED = 8
_R_DEPARTED = 16

SMALL_BYTES = 2 * 1024 * 1024
SMALL_AREAS = 6
LARGE_AREAS = 2
FRAMES = SMALL_AREAS + LARGE_AREAS
_MADV_POPULATE_WRITE = 23
# All blocks exist from the start, so that a reader can join, or fail, before the ring has its size.
_HEADER_BYTES = PAGE + MOST_RECEIVERS * _BLOCK


def segment_path(session: str) -> Path:
    """Return the file of a session. Both sides can name it, so that either can remove it."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        folder = Path(tempfile.gettempdir())
    return folder / f"verl-weights-{re.sub(r'[^A-Za-z0-9_.-]', '_', session)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of the ring. The same for the sender, who chooses them, and the readers, who read them from the header.

    Frames are announced in a ring of `frames` slots with their tables. Payloads lie in areas: many small ones, which
    stay in the cache and let either side run ahead, and two large ones, each for one tensor as large as a bucket.
    """

    readers: int
    table_bytes: int
    small_bytes: int
    large_bytes: int
    """Size of each large area; 0 when no bucket is larger than a small one."""

    @classmethod
    def choose(cls, manifest: Manifest, *, readers: int, bucket_bytes: int) -> Geometry:
        """Return a ring for buckets of `bucket_bytes`, smaller when all tensors together need less."""
        padded = manifest.num_bytes + ALIGNMENT * len(manifest.tensors)
        bucket = aligned(max(1, min(bucket_bytes, padded)))
        longest = max((len(meta.name) * 6 + len(meta.shape) * 24 for meta in manifest.tensors), default=0)
        return cls(
            readers=readers,
            table_bytes=aligned(max(PAGE, longest + 512)),
            small_bytes=min(bucket, SMALL_BYTES),
            large_bytes=bucket if bucket > SMALL_BYTES else 0,
        )

    @property
    def areas(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where in the file each small and each large area begins."""
        stride = aligned(self.small_bytes, PAGE)
        large_at = self._areas_at + SMALL_AREAS * stride
        large = aligned(self.large_bytes, PAGE)
        return (
            tuple(self._areas_at + index * stride for index in range(SMALL_AREAS)),
            tuple(large_at + index * large for index in range(LARGE_AREAS)) if large else (),
        )

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        small, large = aligned(self.small_bytes, PAGE), aligned(self.large_bytes, PAGE)
        return self._areas_at + SMALL_AREAS * small + LARGE_AREAS * large

    def frame_at(self, sequence: int) -> int:
        """Return where in the file frame `sequence` is announced."""
        return _HEADER_BYTES + sequence % FRAMES * (ALIGNMENT + self.table_bytes)

    @property
    def _areas_at(self) -> int:
        return aligned(_HEADER_BYTES + FRAMES * (ALIGNMENT + self.table_bytes), PAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """One frame as it was announced."""

    sequence: int
    kind: int
    table: bytes
    payload_at: int
    """Where in the file its payload begins."""
    payload_bytes: int


class Segment:
    """One mapped file. Header words and slots are reached through it; whose they are is the roles' business."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map(size)

    @classmethod
    def create(cls, path: Path, owner: ProcessId) -> Segment:
        """Make the file with an empty header. Raises `StateError` when the session already has one."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as exc:
            raise StateError(f"{path} exists: every sync needs a session name of its own") from exc
        os.ftruncate(descriptor, _HEADER_BYTES)
        segment = cls(path, descriptor, _HEADER_BYTES)
        segment._words[_W_PID] = owner.pid
        segment._words[_W_STARTED] = owner.started
        segment._words[_W_MAGIC] = _MAGIC
        return segment

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Map the header of an existing file. Raises FileNotFoundError, or ValueError for a file of another kind."""
        descriptor = os.open(path, os.O_RDWR)
        if os.fstat(descriptor).st_size < _HEADER_BYTES:
            os.close(descriptor)
            raise ValueError(f"{path} is no weight ring: it is shorter than a header")
        segment = cls(path, descriptor, _HEADER_BYTES)
        if segment._words[_W_MAGIC] != _MAGIC:
            segment.close()
            raise ValueError(f"{path} is no weight ring of this version")
        return segment

    def _map(self, size: int) -> None:
        # Never closed by hand: tensors that view the mapping keep it alive, and the last one to go unmaps it.
        self._mapping = mmap.mmap(self._descriptor, size)
        self.bytes = memoryview(self._mapping)
        self._words = self.bytes[: size // 8 * 8].cast("q")
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def _unmap(self) -> None:
        self._words.release()
        self.bytes.release()
        del self.tensor, self._mapping

    def grow(self, geometry: Geometry) -> None:
        """Give the file its slots and announce them. The sender's."""
        os.ftruncate(self._descriptor, geometry.total_bytes)
        self._unmap()
        self._map(geometry.total_bytes)
        self._geometry = geometry
        self._words[_W_TABLE] = geometry.table_bytes
        self._words[_W_SMALL] = geometry.small_bytes
        self._words[_W_LARGE] = geometry.large_bytes
        self._words[_W_READERS] = geometry.readers
        self._words[_W_STATE] = READY

    def attach(self) -> Geometry:
        """Map the slots too. A reader's, once the state is no longer `NEW`."""
        words = self._words
        self._geometry = Geometry(
            readers=words[_W_READERS],
            table_bytes=words[_W_TABLE],
            small_bytes=words[_W_SMALL],
            large_bytes=words[_W_LARGE],
        )
        del words
        self._unmap()
        self._map(self._geometry.total_bytes)
        return self._geometry

    @property
    def owner(self) -> ProcessId:
        """The sender's process."""
        return ProcessId(pid=self._words[_W_PID], started=self._words[_W_STARTED])

    @property
    def state(self) -> int:
        """State of the sender."""
        return self._words[_W_STATE]

    @state.setter
    def state(self, value: int) -> None:
        self._words[_W_STATE] = value

    @property
    def head(self) -> int:
        """Frames published so far."""
        return self._words[_W_HEAD]

    @head.setter
    def head(self, value: int) -> None:
        self._words[_W_HEAD] = value

    def reader_state(self, reader: int) -> int:
        """Return the state of a reader."""
        return self._words[_block_word(reader) + _R_STATE]

    def set_reader_state(self, reader: int, state: int) -> None:
        """Set the state of a reader. Its own."""
        self._words[_block_word(reader) + _R_STATE] = state

    def cursor(self, reader: int) -> int:
        """Return how many frames a reader is done with."""
        return self._words[_block_word(reader) + _R_CURSOR]

    def set_cursor(self, reader: int, cursor: int) -> None:
        """Give frames back. The reader's."""
        self._words[_block_word(reader) + _R_CURSOR] = cursor

    def dropped(self, reader: int) -> bool:
        """Return whether the sender goes on without this reader."""
        return self._words[_block_word(reader) + _R_DROPPED] != 0

    def drop(self, reader: int) -> None:
        """Go on without this reader. The sender's."""
        self._words[_block_word(reader) + _R_DROPPED] = 1

    def depart(self, name: str) -> None:
        """Say that the reader `name`, which does not know its place yet, will never join."""
        word, mark = _departure(name)
        self._words[word] = mark

    def departed(self, name: str) -> bool:
        """Return whether the reader `name` said that it will never join."""
        word, mark = _departure(name)
        return self._words[word] == mark

    def sender_words(self) -> str:
        """Return why the sender failed."""
        return self._read_message(0, _W_LENGTH)

    def set_sender_words(self, text: str) -> None:
        """Say why the sender failed, before the state says that it did."""
        self._write_message(0, _W_LENGTH, text)

    def reader_words(self, reader: int) -> str:
        """Return why a reader failed."""
        return self._read_message(PAGE + reader * _BLOCK, _R_LENGTH)

    def set_reader_words(self, reader: int, text: str) -> None:
        """Say why a reader failed, before its state says that it did."""
        self._write_message(PAGE + reader * _BLOCK, _R_LENGTH, text)

    def _read_message(self, at: int, length_word: int) -> str:
        length = self._words[at // 8 + length_word]
        return bytes(self.bytes[at + _MESSAGE_AT : at + _MESSAGE_AT + length]).decode(errors="replace")

    def _write_message(self, at: int, length_word: int, text: str) -> None:
        data = text.encode(errors="replace")[:_MESSAGE_BYTES]
        self.bytes[at + _MESSAGE_AT : at + _MESSAGE_AT + len(data)] = data
        self._words[at // 8 + length_word] = len(data)

    def write_frame(self, kind: int, table: bytes, payload_at: int, payload_bytes: int) -> None:
        """Write the next frame's header and table, then publish it. The payload is in place already."""
        sequence = self.head
        at = self._geometry.frame_at(sequence)
        self.bytes[at + ALIGNMENT : at + ALIGNMENT + len(table)] = table
        for word, value in enumerate((sequence, kind, len(table), payload_at, payload_bytes), at // 8):
            self._words[word] = value
        self.head = sequence + 1

    def read_frame(self, sequence: int) -> FrameHeader:
        """Return what is announced where frame `sequence` belongs."""
        at = self._geometry.frame_at(sequence)
        found, kind, table_bytes, payload_at, payload_bytes = self._words[at // 8 : at // 8 + 5]
        return FrameHeader(
            sequence=found,
            kind=kind,
            table=bytes(self.bytes[at + ALIGNMENT : at + ALIGNMENT + table_bytes]),
            payload_at=payload_at,
            payload_bytes=payload_bytes,
        )

    def populate(self, start: int, stop: int) -> None:
        """Make the kernel provide these bytes at once: one call is several times cheaper than a fault per page."""
        first = start // PAGE * PAGE
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel older than 5.14
                self._mapping.madvise(_MADV_POPULATE_WRITE, first, stop - first)

    def unlink(self) -> None:
        """Remove the name; the memory goes when the last process that maps it does. Idempotent."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the mapping. Tensors that view it stay valid."""
        self._unmap()
        os.close(self._descriptor)


def remove_if_orphaned(path: Path) -> None:
    """Remove a file whose sender is dead. Harmless when there is none."""
    try:
        segment = Segment.open(path)
    except (OSError, ValueError):
        return
    owner = segment.owner
    segment.close()
    if not owner.alive():
        path.unlink(missing_ok=True)
        logging.getLogger(__name__).info("removed %s, which sender process %d left behind", path, owner.pid)


def _departure(name: str) -> tuple[int, int]:
    """Return word and mark of a departure. Should two names share a word, the first is noticed as a stall only."""
    mark = xxhash.xxh3_64_intdigest(name.encode()) >> 1 | 1
    return _block_word(mark % MOST_RECEIVERS) + _R_DEPARTED, mark


def _block_word(reader: int) -> int:
    return (PAGE + reader * _BLOCK) // 8
