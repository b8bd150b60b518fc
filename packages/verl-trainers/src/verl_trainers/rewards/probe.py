"""Whether a reward function can be loaded, found out in a process that can be killed.

The driver never imports a user's reward file itself: one that waits for a server at import would hold up the command
for ever, and one that ends its process would end the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from typing import TYPE_CHECKING

from verl_trainers.rewards.family import end_family, new_mark
from verl_trainers.rewards.process import describe_exit, start_child
from verl_trainers.rewards.wire import CHUNK, FrameReader, NotReady, Ready, pack, write_all

if TYPE_CHECKING:
    from verl_trainers.rewards.wire import Setup

__all__ = ["RewardProbe"]

_EXIT_LIMIT_S = 10.0


class RewardProbe:
    """Starts loading a reward function when made; `finish` says how it went. Call it, whatever happens in between."""

    def __init__(self, setup: Setup) -> None:
        self._limit_s = setup.start_limit_s
        self._until = time.monotonic() + setup.start_limit_s
        self._mark = new_mark()
        self._process = start_child(mark=self._mark, stderr=subprocess.DEVNULL)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a reward process was started without pipes")
        self._stdout = self._process.stdout.fileno()
        with contextlib.suppress(BrokenPipeError):  # reading says that it ended
            write_all(self._process.stdin.fileno(), pack(setup))

    def finish(self) -> str | None:
        """Return why the function cannot be loaded, None when it can. Stops everything that was started."""
        try:
            return self._verdict()
        finally:
            end_family(self._process.pid, self._mark)
            self._process.wait(_EXIT_LIMIT_S)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _verdict(self) -> str | None:
        frames = FrameReader()
        while select.select([self._stdout], [], [], max(0.0, self._until - time.monotonic()))[0]:
            data = os.read(self._stdout, CHUNK)
            if not data:
                return f"loading it ended the process ({describe_exit(self._process.wait(_EXIT_LIMIT_S))})"
            for frame in frames.feed(data):
                if isinstance(frame, Ready):
                    return None
                if isinstance(frame, NotReady):
                    return frame.reason
        return (
            f"loading it took longer than reward.start_limit_s={self._limit_s:g} s: something hangs or is slow at its "
            "import; do that work in the function, at its first call, or raise the limit"
        )
