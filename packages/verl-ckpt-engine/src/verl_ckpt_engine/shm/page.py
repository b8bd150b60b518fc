"""A reader's memory: one page that says how far it is, which the sender looks at.

Owns the words of the page. It exists from `prepare` on, before any ring is known, so that a reader that gives up early
can say so, and one that is gone is noticed. Only the reader writes it, and it says for which session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.memory import PAGE, SharedMemory
from verl_ckpt_engine.shm.ring import read_message, write_message

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["READER_DONE", "READER_FAILED", "READER_WAITED_FOR", "ReaderPage"]

READER_WAITED_FOR, READER_DONE, READER_FAILED = 0, 1, 2
"""States of a reader."""

_MAGIC = 0x7665726C_70670001
_W_MAGIC, _W_SESSION, _W_STATE, _W_CURSOR = range(4)


class ReaderPage:
    """One reader's page, as it writes it or as the sender sees it."""

    def __init__(self, memory: SharedMemory) -> None:
        """Use `create` or `open`."""
        self.memory = memory

    @classmethod
    def create(cls) -> ReaderPage:
        """Make an empty page."""
        page = cls(SharedMemory.create(PAGE))
        page.memory.words[_W_MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, address: Mapping[str, str]) -> ReaderPage:
        """Map a reader's page. Raises OSError when it is gone or out of reach, or is of another version."""
        memory = SharedMemory.open(address)
        if len(memory) < PAGE or memory.words[_W_MAGIC] != _MAGIC:
            raise OSError(f"{address['memory']} is no reader's page of this version")
        return cls(memory)

    def begin(self, session: int) -> None:
        """Begin another session. Its number comes last, when nothing of the one before is left."""
        words = self.memory.words
        words[_W_STATE] = READER_WAITED_FOR
        words[_W_CURSOR] = 0
        words[_W_SESSION] = session

    @property
    def session(self) -> int:
        """Number of the present session."""
        return self.memory.words[_W_SESSION]

    @property
    def state(self) -> int:
        """State of the reader."""
        return self.memory.words[_W_STATE]

    @property
    def cursor(self) -> int:
        """Frames that the reader is done with."""
        return self.memory.words[_W_CURSOR]

    @cursor.setter
    def cursor(self, value: int) -> None:
        self.memory.words[_W_CURSOR] = value

    @property
    def message(self) -> str:
        """Why the reader failed."""
        return read_message(self.memory)

    def done(self) -> None:
        """Say that everything is loaded."""
        self.memory.words[_W_STATE] = READER_DONE

    def fail(self, reason: str) -> None:
        """Say that, and why, the reader is lost."""
        write_message(self.memory, reason)
        self.memory.words[_W_STATE] = READER_FAILED
