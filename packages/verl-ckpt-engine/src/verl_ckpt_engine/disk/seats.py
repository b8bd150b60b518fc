"""Who is there, and how far: one file for each party of a session, locked as long as its process lives.

Owns what a folder knows of processes. The name of a seat says how far its holder is, and changes by renaming, so that
nobody sees half of a change. The lock goes when the holder dies, however it dies, which the kernel sees to, and on most
network file systems the server: a peer that was killed leaves no message.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["ACK", "FAIL", "HERE", "SENDER", "Seat", "is_held", "locked", "poll", "receiver_seat"]

HERE: Final = "here"
"""The holder is at work."""
ACK: Final = "ack"
"""The holder has loaded everything."""
FAIL: Final = "fail"
"""The holder gave up; the file says why."""
SENDER: Final = "sender"
"""Whose seat the sender's is."""

_SHORTEST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_PAUSE_SHARE: Final = 1 / 16
"""Pause as a share of the time waited so far, so that noticing late costs little in proportion."""


def receiver_seat(owner: str, rank: int) -> str:
    """Return whose seat that of a receiver is, fit for a file name."""
    return f"{quote(owner, safe='')}-{rank}"


class Seat:
    """One party's file in a session's folder."""

    def __init__(self, folder: Path, who: str, descriptor: int) -> None:
        """Use `take`."""
        self._path = folder / f"{HERE}-{who}"
        self._who = who
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def take(cls, folder: Path, who: str) -> Seat:
        """Sit down in `folder`, visible once the lock is held. Raises OSError when the folder is gone."""
        path = folder / f".{who}-{uuid.uuid4().hex}"
        seat = cls(folder, who, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            fcntl.flock(seat._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"files in {folder} cannot be locked ({exc.strerror}); mount that file system with flock, or choose "
                "another folder"
            ) from exc
        path.rename(seat._path)
        return seat

    def become(self, state: str, text: str = "") -> None:
        """Say how far the holder is. Raises OSError when the folder is gone."""
        try:
            os.pwrite(self._descriptor, text.encode(), 0)
        finally:  # without words, on a full disk, the state is still told
            target = self._path.with_name(f"{state}-{self._who}")
            self._path.rename(target)
            self._path = target

    def leave(self) -> None:
        """Give up the lock; the file stays. Idempotent."""
        if self._close.alive:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # by hand, for forked children hold copies of the descriptor
            self._close()

    def move(self, folder: Path) -> None:
        """Note that the folder has another name now."""
        self._path = folder / self._path.name


@contextmanager
def locked(path: Path, *, shared: bool) -> Iterator[bool]:
    """Lock a file for the block; what is given says whether nobody else has it. Raises OSError when it is gone."""
    descriptor = os.open(path, os.O_RDONLY if shared else os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether a living process holds this seat. Raises OSError when it is gone."""
    with locked(path, shared=True) as free:
        return not free


def poll(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Return once `ready()`; meanwhile call `check`, which must know the deadline and ends the wait by raising."""
    begun = time.monotonic()
    while not ready():
        check()
        waited = time.monotonic() - begun
        time.sleep(max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, waited * _PAUSE_SHARE)))
