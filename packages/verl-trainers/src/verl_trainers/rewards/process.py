"""One killable child process that runs a reward function, as its pool sees it.

Owns the process group, the two pipes, and the clock of the job that is executing. It decides when the child is dead;
what that means for the jobs is the pool's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from verl_trainers.rewards.family import MARK, end_family, new_mark
from verl_trainers.rewards.wire import CHUNK, Done, FrameReader, NotReady, Ready, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_contracts.rewards import RewardResult
    from verl_trainers.rewards.wire import Job, Setup

__all__ = ["ChildProcess", "describe_exit", "start_child"]

_REAP_LIMIT_S = 10.0
_EXIT_LIMIT_S = 2.0


def start_child(*, mark: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Start a process that waits for its `Setup`, in a session of its own and with `mark`; `stderr` as Popen's."""
    path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "verl_trainers.rewards.child"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, MARK: mark},
    )


class ChildProcess:
    """A child that works on jobs in order. Used from one event loop.

    `on_done` is told each verdict; `on_end` is told once that the child is gone, with the reason and whether a job or
    the start ran out of time. Jobs not yet done are then in `jobs`, the executing one first.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        on_done: Callable[[ChildProcess, int, RewardResult], None],
        on_end: Callable[[ChildProcess, str, bool], None],
    ) -> None:
        self.jobs: deque[Job] = deque()
        self.ready = False
        self.ended = False
        self.broken: str | None = None
        """Why the function cannot be loaded; None when it can, or it is not known yet."""
        self._limit_s, self._start_limit_s = setup.limit_s, setup.start_limit_s
        self._on_done = on_done
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader()
        self._outgoing = bytearray()
        self._writing = False
        self._mark = new_mark()
        self._process = start_child(mark=self._mark)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a reward process was started without pipes")
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._loop.add_reader(self._stdout, self._read)
        self._timer = self._loop.call_later(self._start_limit_s, self._expire)
        self._write(pack(setup))

    @property
    def pid(self) -> int:
        """Process id, also of the group."""
        return self._process.pid

    def submit(self, jobs: Sequence[Job]) -> None:
        """Append jobs; all of them travel in one frame."""
        idle = not self.jobs
        self.jobs.extend(jobs)
        self._write(pack(tuple(jobs)))
        if idle:
            self._restart_timer()

    def end(self, reason: str, *, expired: bool = False) -> None:
        """Kill the child with everything that it forked, and tell the pool. Does nothing the second time."""
        if self.ended:
            return
        self.ended = True
        self._timer.cancel()
        self._loop.remove_reader(self._stdout)
        if self._writing:
            self._loop.remove_writer(self._stdin)
        end_family(self._process.pid, self._mark)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._on_end(self, reason, expired)

    async def reap(self) -> None:
        """Return once the killed process is gone from the process table."""
        await asyncio.to_thread(self._process.wait, _REAP_LIMIT_S)

    def _restart_timer(self) -> None:
        if self.ended or not self.ready:
            return
        self._timer.cancel()
        if self.jobs:
            self._timer = self._loop.call_later(self._limit_s, self._expire)

    def _expire(self) -> None:
        code = self._process.poll()
        if code is not None:  # what it forked still holds the pipe
            self.end(f"the reward process ended by itself ({describe_exit(code)})")
            return
        if self.ready:
            self.end(f"one reward took longer than reward.limit_s={self._limit_s:g} s", expired=True)
            return
        limit = f"reward.start_limit_s={self._start_limit_s:g} s"
        self.end(f"loading the reward function took longer than {limit}", expired=True)

    def _read(self) -> None:
        try:
            data = os.read(self._stdout, CHUNK)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the pipe closes a moment before the process is gone
                self._process.wait(_EXIT_LIMIT_S)
            self.end(f"the reward process ended by itself ({describe_exit(self._process.returncode)})")
            return
        for frame in self._frames.feed(data):
            if isinstance(frame, Done):
                self.jobs.popleft()
                self._on_done(self, frame.number, frame.result)
            elif isinstance(frame, Ready):
                self.ready = True
            elif isinstance(frame, NotReady):
                self.broken = frame.reason
        self._restart_timer()

    def _write(self, data: bytes) -> None:
        self._outgoing += data
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._stdin, self._outgoing)]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._stdin, self._flush)
            return
        except BrokenPipeError:
            self._outgoing.clear()  # reading says that it ended
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._stdin)


def describe_exit(code: int | None) -> str:
    """Say how a process ended; None is one that has not."""
    if code is None:
        return "pipe closed"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
