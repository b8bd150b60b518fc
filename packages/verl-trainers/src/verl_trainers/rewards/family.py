"""Everything that descends from one reward process, and its end.

A function may start processes in sessions of their own, whose parents are gone by the time that they must be stopped;
the process group misses those. So the leader of a family adopts orphans, and who descends from it is a member. Where
the leader is gone already, or cannot adopt, a mark in the environment is known, which all inherit that keep theirs.
Prevents programs that a reward started (a sandbox, a server) from outliving the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path

__all__ = ["MARK", "adopt_orphans", "end_family", "end_with_parent", "new_mark"]

MARK = "VERL_REWARD_PROCESS"
"""Variable that a reward process and all that descend from it have in common."""
_PROC = Path("/proc")
_MAX_PASSES = 20
"""A family that forks while it is being killed is looked for again, this often at most."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def new_mark() -> str:
    """Return a value of `MARK` that no other family has."""
    return uuid.uuid4().hex


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own is gone, as init would be. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def end_family(leader: int, mark: str) -> None:
    """Kill whoever descends from `leader`, carries `mark` or is in the group of `leader`, the caller excepted.

    The leader goes last: while it lives, it adopts whom its descendants leave behind. Where there is no ``/proc``, the
    group is all that is known.
    """
    for _ in range(_MAX_PASSES):
        members = _members(leader, mark) - {leader, os.getpid()}
        if not members:
            break
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone by itself, with all of its group
        if os.getpgrp() != leader:
            os.killpg(leader, signal.SIGKILL)


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
