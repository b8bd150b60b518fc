"""Finding and ending the processes that an actor left behind. Linux, standard library only.

A child that was started by a process which is gone has no parent to tell whose it was. Two things still do: its process
group, when it stayed in it, and the mark that it inherited in its environment, when it left the group. A child that
changes both is beyond reach.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["MARK", "sweep"]

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
