"""Everything that descends from one reward process, and its end.

A function may start processes in sessions of their own, whose parents are gone by the time that they must be stopped;
the process group misses those. So each reward process carries a mark in its environment, which all of them inherit.
Prevents programs that a reward started (a sandbox, a server) from outliving the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from pathlib import Path

__all__ = ["MARK", "end_family", "new_mark"]

MARK = "VERL_REWARD_PROCESS"
"""Variable that a reward process and all that descend from it have in common."""
_PROC = Path("/proc")
_MAX_PASSES = 20
"""A family that forks while it is being killed is looked for again, this often at most."""


def new_mark() -> str:
    """Return a value of `MARK` that no other family has."""
    return uuid.uuid4().hex


def end_family(leader: int, mark: str) -> None:
    """Kill the group of `leader` and whoever carries `mark` or descends from one of them, the caller excepted.

    Where there is no ``/proc``, the group is all that is known.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone by itself, with all of its group
        if os.getpgrp() != leader:
            os.killpg(leader, signal.SIGKILL)
    for _ in range(_MAX_PASSES):
        members = _members(leader, mark) - {os.getpid()}
        if not members:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _members(leader: int, mark: str) -> set[int]:
    """Return the living processes of a family."""
    wanted = f"{MARK}={mark}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in _PROC.glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(folder.name)] = int(parent)
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except (OSError, ValueError):  # gone meanwhile, or another user's
            continue
    known = found | {leader}
    while more := {pid for pid, parent in parents.items() if parent in known and pid not in known}:
        known |= more
    return known & parents.keys()
