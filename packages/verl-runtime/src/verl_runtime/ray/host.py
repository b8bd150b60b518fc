"""The one class that runs inside Ray actors. It builds the object and serves it.

Two event loops: *default* runs the object's `async def` methods, *control* answers the driver (is alive, what failed,
stop), so that an object which blocks its own loop can still be watched and stopped.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.failures import FailureRecord
from verl_contracts.runtime import ActorContext
from verl_runtime.failures import FailureChannel
from verl_runtime.objects import HostedObject
from verl_runtime.processes import MARK, sweep
from verl_runtime.ray.autopsy import LAST_WORDS
from verl_runtime.ray.caller import RayCaller
from verl_runtime.ray.owner import OwnerWatch
from verl_runtime.ray.sessions import Session
from verl_runtime.ray.wire import pack_replies, unpack, unpack_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.runtime import ObjectSpec
    from verl_runtime.ray.wire import Boot, Packet

__all__ = ["CONTROL", "ActorHost", "Birth"]

CONTROL = "control"
"""Name of Ray's concurrency group, hence of the thread and event loop, for the driver's own calls."""

_log = logging.getLogger(__name__)
_LISTEN_S = 20.0
_UNWIND_S = 2.0
_FORGET_SESSION_S = 60.0


class Birth(NamedTuple):
    """Where the process came to life."""

    pid: int
    node: str
    node_id: str


class _LoggedChannel(FailureChannel):
    """Writes reports to the log as well, should the process die before the driver has fetched them."""

    def report(self, record: FailureRecord, /) -> None:
        _log.error("reported: %s", record)
        super().report(record)


class ActorHost:
    """Hosts one object for the whole life of its process."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._mark = f"{boot.namespace}/{boot.name}"
        self._pid = os.getpid()
        os.environ.update(boot.env)
        os.environ[MARK] = self._mark
        sys.path.extend(path for path in boot.sys_path if path not in sys.path)
        _write_output_to(boot.log_path)
        self._keep_last_words()
        self._clock = SystemClock()
        self._hosted = HostedObject(name=boot.name, threads=True)
        self._sessions: dict[str, Session] = {}
        self._failures: FailureChannel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = OwnerWatch(limit_s=boot.owner_limit_s, on_silence=self._leave_alone)

    async def born(self) -> Birth:
        """Control: answer that the process is there."""
        self._failures = _LoggedChannel()
        import ray

        return Birth(self._pid, socket.gethostname(), ray.get_runtime_context().get_node_id())

    async def build(self) -> FailureRecord | None:
        """Default: build the object; return the failure if there is one."""
        boot = self._boot
        self._loop = asyncio.get_running_loop()
        try:
            if self._failures is None:
                raise RuntimeError("build came before born")
            context = ActorContext(
                run_id=boot.run_id,
                role=boot.role,
                rank=boot.rank,
                caller=RayCaller(clock=self._clock),
                clock=self._clock,
                failures=self._failures,
            )
            spec = cast("ObjectSpec", unpack(boot.target, boot.target_refs))
            await self._hosted.build(spec, context)
        except (Exception, SystemExit) as exc:
            return FailureRecord.from_exception(exc, role=boot.role, rank=boot.rank)
        return None

    async def exchange(self, session: str, calls: Packet, cancels: Sequence[int]) -> Packet:
        """Default: start and cancel calls of one caller; return what is complete."""
        if session not in self._sessions:
            self._forget_sessions()
            self._sessions[session] = Session(
                self._hosted, role=self._boot.role, rank=self._boot.rank, clock=self._clock, on_exit=self._end
            )
        return pack_replies(await self._sessions[session].exchange(unpack_calls(calls), cancels))

    async def beat(self) -> None:
        """Control: the driver lives."""
        self._owner.beat()

    async def listen(self) -> list[FailureRecord]:
        """Control: return what the object reported, waiting for it if need be."""
        return await self._failures.take(_LISTEN_S) if self._failures is not None else []

    async def stop(self, limit_s: float) -> None:
        """Control: cancel the calls, close the object, and kill the children. The driver ends the process after."""
        deadline = Deadline.after(self._clock, limit_s)
        if self._loop is not None:
            closing = asyncio.run_coroutine_threadsafe(self._close(deadline), self._loop)
            await asyncio.wait({asyncio.wrap_future(closing)}, timeout=limit_s)
        await asyncio.to_thread(sweep, mark=self._mark, groups=(self._pid,))

    async def _close(self, deadline: Deadline) -> None:
        tasks = {task for session in self._sessions.values() for task in session.cancel()}
        if tasks:
            await asyncio.wait(tasks, timeout=deadline.within(self._clock, _UNWIND_S).remaining(self._clock))
        await self._hosted.close(deadline=deadline, clock=self._clock)

    def _forget_sessions(self) -> None:
        old = self._clock.now() - _FORGET_SESSION_S
        for name, session in list(self._sessions.items()):
            if session.idle and session.used_at < old:
                del self._sessions[name]

    def _keep_last_words(self) -> None:
        leave = os._exit

        def leave_with_words(status: int) -> NoReturn:
            if os.getpid() == self._pid:  # a forked child leaves this way as a matter of course
                sys.stderr.write(f"{LAST_WORDS}os._exit({status})\n")
            leave(status)

        os._exit = leave_with_words

    def _leave_alone(self) -> None:
        self._end(f"the driver was silent for {self._boot.owner_limit_s:g} s")

    def _end(self, reason: str) -> None:
        sys.stderr.write(f"{LAST_WORDS}{reason}\n")
        sweep(mark=self._mark, groups=(self._pid,))
        os.kill(self._pid, signal.SIGKILL)


def _write_output_to(path: str) -> None:
    """Send everything that this process and its children print to the actor's log."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=form)
