"""Ends what a driver left behind when it died without a chance to clean up.

`Guardian` starts a small process of its own and tells it which process groups belong to the run. That process sees the
end of the driver, however it comes, as the end of its standard input, and then kills every process of the run on this
machine: actors, their children, and children that ignore SIGTERM. It runs this very file and imports nothing else of
the project, so that it starts in some 20 ms and needs nothing to be installed.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Guardian"]

_log = logging.getLogger(__name__)
_STOP_S = 5.0
_PROGRAM = """
import runpy, shutil, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sweep = runpy.run_path(sys.argv[1])["sweep"]
groups = {int(line) for line in sys.stdin}
for _ in range(3):
    if not sweep(mark=sys.argv[2], groups=groups):
        break
    time.sleep(0.2)
if sys.argv[3]:
    shutil.rmtree(sys.argv[3], ignore_errors=True)
"""


class Guardian:
    """The driver's end of the guardian process."""

    def __init__(self, *, namespace: str, folder: str | None) -> None:
        """Start it; `folder` is removed in the end when it is not None."""
        sweeper = Path(__file__).parent.parent / "processes.py"
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(sweeper), f"{namespace}/", folder or ""],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """Note that a process group belongs to the run."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{group}\n")
                self._process.stdin.flush()

    def close(self) -> None:
        """Let it sweep once and end. Harmless when done twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
