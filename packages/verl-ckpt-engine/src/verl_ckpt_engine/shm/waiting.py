"""How two processes that share only memory wait for each other: by polling, within a limit, never for the dead.

Owns the back-off and the question whether a process still lives. A peer that was killed leaves no message, so each
wait asks the kernel from time to time; a zombie counts as dead, since it will never write again.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LIVENESS_EVERY_S", "ProcessId", "poll", "process_scope"]

LIVENESS_EVERY_S = 0.1
"""How often a waiting side asks whether its peers live."""

_YIELD_FOR_S = 200e-6
_PAUSE_SHARE = 1 / 16
"""Longest pause as a share of the time waited so far, so that noticing late costs little in proportion."""
_LONGEST_PAUSE_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process, told apart from a later one that got the same number."""

    pid: int
    started: int
    """Start time in clock ticks since boot; 0 where the system does not tell."""

    @classmethod
    def of_this_process(cls) -> ProcessId:
        """Return the calling process."""
        pid = os.getpid()
        found = _read_stat(pid)
        return cls(pid=pid, started=found[1] if found is not None else 0)

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """Return what `str` wrote."""
        pid, _, started = text.partition(":")
        return cls(pid=int(pid), started=int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    def alive(self) -> bool:
        """Return whether it still runs."""
        if not self.started:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
            return True
        found = _read_stat(self.pid)
        return found is not None and found[1] == self.started and found[0] not in "ZX"


def process_scope() -> str:
    """Return what two processes share exactly when either can find the other by its number.

    It names the running kernel and the pid namespace, which differs between containers; "0" where none can be told.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return "0"
    return f"{boot[:8]}.{namespace}"


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of `pid`, or None when there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def poll(ready: Callable[[], bool], check: Callable[[], None], check_peers: Callable[[], None]) -> None:
    """Return once `ready()`; meanwhile call `check` often and `check_peers` every `LIVENESS_EVERY_S`.

    The checks end the wait by raising; one of them must know the deadline.
    """
    if ready():
        return
    begun = asked = time.monotonic()
    while time.monotonic() - begun < _YIELD_FOR_S:
        time.sleep(0)
        if ready():
            return
    while not ready():
        check()
        now = time.monotonic()
        if now - asked >= LIVENESS_EVERY_S:
            asked = now
            check_peers()
        time.sleep(min(_LONGEST_PAUSE_S, (now - begun) * _PAUSE_SHARE))
