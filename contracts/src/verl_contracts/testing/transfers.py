"""Driving one transfer in tests: a sender in this process, receivers in threads or in spawned processes.

Owns the hard limits: whatever the backend does, a transfer ends here within `LIMIT_S`, or the test fails.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.plugins.finding import find_class
from verl_contracts.testing.tensors import KeepingTarget, payload_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from verl_contracts.weights import (
        EndpointInfo,
        Plan,
        TransferReport,
        WeightBackend,
        WeightReceiver,
        WeightSender,
        WeightSource,
    )

__all__ = ["LIMIT_S", "Ended", "ProcessReceiver", "Session", "ThreadReceiver", "run_in_thread"]

LIMIT_S = 60.0
CLOCK = SystemClock()
T = TypeVar("T")
_sessions = itertools.count()


@dataclass(slots=True, kw_only=True)
class Ended(Generic[T]):
    """How something that ran elsewhere ended: with a value, or with an error."""

    value: T | None = None
    error: BaseException | None = None
    seconds: float = 0.0


class run_in_thread(Generic[T]):  # noqa: N801 - reads as a call
    """Call a blocking function on a thread of its own."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._ended: Ended[T] = Ended()

        def body() -> None:
            began = time.monotonic()
            try:
                self._ended.value = function()
            except BaseException as exc:
                self._ended.error = exc
            self._ended.seconds = time.monotonic() - began

        self._thread = threading.Thread(target=body, daemon=True)
        self._thread.start()

    def end(self, limit_s: float = LIMIT_S) -> Ended[T]:
        """Wait for the end. Raises TimeoutError when it hangs."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"still blocked after {limit_s} s, in spite of its deadline")
        return self._ended


class ThreadReceiver:
    """A receiver in this process, with a target that keeps what arrives."""

    def __init__(
        self, backend: type[WeightBackend], owner: str, *, before: Callable[[int], None] | None = None
    ) -> None:
        make = cast("Callable[..., WeightReceiver]", backend.receiver_class)
        self.receiver = make(owner=owner, clock=CLOCK)
        self.target = KeepingTarget(before=before)

    def prepare(self, session: str, rank: int) -> EndpointInfo:
        """Prepare it."""
        return self.receiver.prepare(session=session, rank=rank)

    def start(self, plan: Plan, limit_s: float) -> run_in_thread[TransferReport]:
        """Start to receive."""
        deadline = Deadline.after(CLOCK, limit_s)
        return run_in_thread(lambda: self.receiver.receive(plan, self.target, deadline=deadline))

    def digests(self) -> dict[str, str]:
        """Return the kit's digest of each tensor that arrived."""
        return {name: payload_digest(tensor) for name, tensor in self.target.tensors.items()}

    def close(self) -> None:
        """Close it."""
        self.receiver.close()


class ProcessReceiver:
    """A receiver in a spawned process. `stall_at` makes its target stop for ever at that tensor."""

    def __init__(self, backend: type[WeightBackend], owner: str, *, stall_at: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        path = f"{backend.__module__}:{backend.__qualname__}"
        self._process = context.Process(target=_serve, args=(theirs, path, owner, stall_at), daemon=True)
        self._process.start()
        theirs.close()
        self._digests: dict[str, str] = {}

    def prepare(self, session: str, rank: int) -> EndpointInfo:
        """Prepare it."""
        self._pipe.send(("prepare", session, rank))
        return cast("EndpointInfo", self._answer())

    def start(self, plan: Plan, limit_s: float) -> run_in_thread[TransferReport]:
        """Start to receive."""
        self._pipe.send(("receive", plan, limit_s))

        def result() -> TransferReport:
            report, self._digests = cast("tuple[TransferReport, dict[str, str]]", self._answer())
            return report

        return run_in_thread(result)

    def digests(self) -> dict[str, str]:
        """Return the kit's digest of each tensor that arrived."""
        return self._digests

    def kill(self) -> None:
        """End the process as the kernel does when memory runs out."""
        self._process.kill()
        self._process.join(LIMIT_S)

    def close(self) -> None:
        """Close the receiver, and end its process."""
        if self._process.is_alive():
            self._pipe.send(("close",))
            self._process.join(LIMIT_S)
            self._process.kill()
            self._process.join(LIMIT_S)
        self._pipe.close()
        self._process.close()

    def _answer(self) -> object:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"the receiver process did not answer within {LIMIT_S} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(pipe: Connection, path: str, owner: str, stall_at: int | None) -> None:
    """Body of a receiver process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    backend = cast("type[WeightBackend]", find_class(path, key="the suite's backend", role="receiver"))
    stop = threading.Event()

    def stall(index: int) -> None:
        if index == stall_at:
            stop.wait(LIMIT_S)

    held = ThreadReceiver(backend, owner, before=stall)
    while pipe.poll(LIMIT_S):
        command, *rest = pipe.recv()
        try:
            if command == "close":
                held.close()
                return
            if command == "prepare":
                pipe.send(held.prepare(*rest))
            else:
                ended = held.start(*rest).end()
                if ended.error is not None:
                    raise ended.error
                pipe.send((ended.value, held.digests()))
        except Exception as exc:
            pipe.send(exc)


class Session:
    """One prepared transfer from one sender to several receivers. Use as a context manager: it closes everything."""

    def __init__(
        self,
        backend: type[WeightBackend],
        source: WeightSource,
        receivers: Sequence[ThreadReceiver | ProcessReceiver],
        *,
        bucket_bytes: int = 1 << 20,
        version: int = 1,
        sender: WeightSender | None = None,
    ) -> None:
        """`sender` is one that served a session before; None makes a new one."""
        self.source = source
        self.receivers = receivers
        session = f"kit{os.getpid()}x{next(_sessions)}"
        make = cast("Callable[..., WeightSender]", backend.sender_class)
        self.sender = sender or make(owner="trainer", rank=0, clock=CLOCK)
        manifest = source.manifest(version)
        try:
            mine = self.sender.prepare(manifest, session=session)
            theirs = [receiver.prepare(session, 0) for receiver in receivers]
            self.plan = backend.planner_class().plan(
                manifest, session=session, senders=[mine], receivers=theirs, bucket_bytes=bucket_bytes
            )
        except BaseException:
            self.close()
            raise

    def send(self, limit_s: float = LIMIT_S) -> run_in_thread[TransferReport]:
        """Start to send."""
        deadline = Deadline.after(CLOCK, limit_s)
        return run_in_thread(lambda: self.sender.send(self.plan, self.source, deadline=deadline))

    def transfer(self) -> tuple[TransferReport, list[TransferReport]]:
        """Send to all receivers and return the reports; raises what a side raised."""
        running = [receiver.start(self.plan, LIMIT_S / 2) for receiver in self.receivers]
        ends = [self.send(LIMIT_S / 2).end(), *(each.end() for each in running)]
        for ended in ends:
            if ended.error is not None:
                raise ended.error
        reports = [ended.value for ended in ends if ended.value is not None]
        return reports[0], reports[1:]

    def close(self) -> None:
        """Close both sides."""
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
