"""Finding and ending the processes that an actor left behind.

For Linux, on the standard library only: this file is also run as the program of the guardian process, which has nothing
else of the project.

A child that was started by a process which is gone has no parent to tell whose it was. Two things still do: its process
group, when it stayed in it, and the mark that it inherited in its environment, when it left the group. A child that
changes both is beyond reach.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["MARK", "guard", "sweep"]

MARK = "VERL_ACTOR"
"""Environment variable that every process started by an actor inherits: ``namespace/actor``."""


def sweep(*, mark: str, groups: Collection[int] = ()) -> list[int]:
    """Kill every process marked with `mark` or in one of `groups`, the caller excepted; return their ids.

    A `mark` that ends in ``/`` stands for all the actors of its namespace.
    """
    wanted = f"{MARK}={mark}".encode()
    killed = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        pid = int(folder.name)
        try:
            if os.getpgid(pid) not in groups and not _is_marked((folder / "environ").read_bytes(), wanted):
                continue
        except (OSError, ProcessLookupError):  # it ended meanwhile, or is somebody else's
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def _is_marked(environ: bytes, wanted: bytes) -> bool:
    entries = environ.split(b"\0")
    return any(entry.startswith(wanted) for entry in entries) if wanted.endswith(b"/") else wanted in entries


def guard(mark: str, folder: str) -> None:
    """Read process groups from standard input until the parent is gone; then kill what is left of the run.

    A line ``-7`` takes group 7 back, since its number may be used again. The parent is gone when the input ends, or
    when another process has become the parent: a fork of it may still hold the other end. `folder`, if any, is removed
    at last.
    """
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    parent = os.getppid()
    text = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 0.5)[0]:
            continue
        if not (piece := os.read(0, 4096)):
            break
        text += piece
    groups: set[int] = set()
    for number in map(int, text.split()):
        (groups.add if number > 0 else groups.discard)(abs(number))
    for _ in range(3):  # a process may start another while it is being killed
        if not sweep(mark=mark, groups=groups):
            break
        time.sleep(0.2)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    guard(*sys.argv[1:])
