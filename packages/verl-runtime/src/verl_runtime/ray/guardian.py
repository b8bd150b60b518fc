"""Ends what a driver left behind when it died without a chance to clean up.

`Guardian` starts a small process of its own and tells it which process groups belong to the run. That process sees the
end of the driver, however it comes, as the end of its standard input, and then kills every process of the run on this
machine: actors, their children, and children that ignore SIGTERM. It imports nothing of the project, so that it is
small and starts in some 20 ms.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys

from verl_runtime import processes

__all__ = ["Guardian"]

_STOP_S = 5.0


class Guardian:
    """The driver's end of the guardian process."""

    def __init__(self, *, namespace: str, folder: str | None) -> None:
        """Start it; `folder` is removed in the end when it is not None."""
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", processes.__file__, f"{namespace}/", folder or ""],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """Note that a process group belongs to the run."""
        self._tell(group)

    def forget(self, group: int) -> None:
        """Take a process group back: it is empty, and its number may be used again."""
        self._tell(-group)

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

    def _tell(self, number: int) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{number}\n")
                self._process.stdin.flush()
