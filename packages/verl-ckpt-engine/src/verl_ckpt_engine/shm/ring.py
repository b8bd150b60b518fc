"""The sender's memory: a header that says how a sync stands, the frames, and the payload.

Owns the words of the header. Everything here is written by the sender alone; readers answer in pages of their own. So a
reader that was given up can disturb nobody, however late it wakes. Every word is written after what it announces; that
order is seen by the peers because stores stay in order on x86-64. Elsewhere a torn frame would fail its digest, not
pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.frames import FRAME_BYTES, HEADER, MOST_RECORDS, RECORD, Frame, Record, aligned
from verl_ckpt_engine.shm.geometry import DROPPED_AT, FRAMES, HEADER_BYTES
from verl_ckpt_engine.shm.memory import PAGE, SharedMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENDED", "FAILED", "NEW", "READY", "Ring", "read_message", "write_message"]

_MAGIC = 0x7665726C_77740002
_MESSAGE_AT = 512

NEW, READY, ENDED, FAILED = 0, 1, 2, 3
"""States of the sender."""

_W_MAGIC, _W_GENERATION, _W_STATE, _W_HEAD, _W_READERS, _W_TOTAL, _W_FINGERPRINT = range(7)
_FRAMES_AT = aligned(HEADER_BYTES, PAGE)


class Ring:
    """One ring as the sender fills it, or as a reader sees it. It serves one sync, one generation, at a time."""

    def __init__(self, memory: SharedMemory) -> None:
        """Use `create` or `open`."""
        self.memory = memory

    @classmethod
    def create(cls) -> Ring:
        """Make a ring with an empty header; it gets its size once the plan is known."""
        ring = cls(SharedMemory.create(_FRAMES_AT))
        ring.memory.words[_W_MAGIC] = _MAGIC
        return ring

    @classmethod
    def open(cls, address: Mapping[str, str]) -> Ring:
        """Map the sender's ring. Raises OSError when it is gone or out of reach, or is a ring of another version."""
        memory = SharedMemory.open(address)
        if len(memory) < _FRAMES_AT or memory.words[_W_MAGIC] != _MAGIC:
            raise OSError(f"{address['memory']} is no weight ring of this version")
        return cls(memory)

    def begin(self, generation: int) -> None:
        """Begin another sync. The generation changes first: it tells whoever still reads that he must stop."""
        words = self.memory.words
        words[_W_GENERATION] = generation
        words[_W_STATE] = NEW
        words[_W_HEAD] = 0

    def announce(self, *, readers: int, total_bytes: int, fingerprint: int) -> None:
        """Say that the ring has its size and what it will carry."""
        self.memory.grow(total_bytes)
        words = self.memory.words
        words[_W_READERS] = readers
        words[_W_TOTAL] = total_bytes
        words[_W_FINGERPRINT] = fingerprint
        words[_W_STATE] = READY

    @property
    def generation(self) -> int:
        """Number of the present sync."""
        return self.memory.words[_W_GENERATION]

    @property
    def state(self) -> int:
        """State of the sender."""
        return self.memory.words[_W_STATE]

    @state.setter
    def state(self, value: int) -> None:
        self.memory.words[_W_STATE] = value

    @property
    def head(self) -> int:
        """Frames published so far."""
        return self.memory.words[_W_HEAD]

    @property
    def readers(self) -> int:
        """Readers that the sender listens to, or did."""
        return self.memory.words[_W_READERS]

    @property
    def total_bytes(self) -> int:
        """Size that was announced; a mapping that is shorter must be made again."""
        return self.memory.words[_W_TOTAL]

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the manifest that is sent."""
        return self.memory.words[_W_FINGERPRINT]

    def dropped(self, reader: int, generation: int) -> bool:
        """Return whether that sync goes on without this reader."""
        return self.memory.words[DROPPED_AT // 8 + reader] == generation

    def drop(self, reader: int) -> None:
        """Go on without this reader."""
        self.memory.words[DROPPED_AT // 8 + reader] = self.generation

    @property
    def message(self) -> str:
        """Why the sender failed."""
        return read_message(self.memory)

    def fail(self, reason: str) -> None:
        """Say that, and why, the sender failed."""
        write_message(self.memory, reason)
        self.state = FAILED

    def put_record(self, index: int, record: Record) -> None:
        """Write record number `index` of the next frame."""
        at = self._frame_at(self.head) + HEADER.size + index * RECORD.size
        RECORD.pack_into(self.memory.bytes, at, *record)

    def put_table(self, table: bytes) -> None:
        """Write the next frame's table as a whole."""
        at = self._frame_at(self.head) + HEADER.size
        self.memory.bytes[at : at + len(table)] = table

    def publish(self, generation: int, kind: int, records: int) -> None:
        """Write the next frame's header, then announce it. Table and payload are in place already."""
        sequence = self.head
        HEADER.pack_into(self.memory.bytes, self._frame_at(sequence), generation, sequence, kind, records)
        self.memory.words[_W_HEAD] = sequence + 1

    def read_frame(self, sequence: int) -> Frame:
        """Return what is announced where frame `sequence` belongs."""
        at = self._frame_at(sequence)
        generation, found, kind, records = HEADER.unpack_from(self.memory.bytes, at)
        at += HEADER.size
        table = bytes(self.memory.bytes[at : at + min(records, MOST_RECORDS) * RECORD.size])
        return Frame(generation=generation, sequence=found, kind=kind, table=table)

    def _frame_at(self, sequence: int) -> int:
        return _FRAMES_AT + sequence % FRAMES * FRAME_BYTES


def read_message(memory: SharedMemory) -> str:
    """Return what `write_message` wrote into the first page."""
    length = memory.words[_MESSAGE_AT // 8]
    first = _MESSAGE_AT + 8
    return bytes(memory.bytes[first : min(first + length, PAGE)]).decode(errors="replace")


def write_message(memory: SharedMemory, text: str) -> None:
    """Write a text into the first page, cut where it is full."""
    first = _MESSAGE_AT + 8
    data = text.encode(errors="replace")[: PAGE - first]
    memory.bytes[first : first + len(data)] = data
    memory.words[_MESSAGE_AT // 8] = len(data)
