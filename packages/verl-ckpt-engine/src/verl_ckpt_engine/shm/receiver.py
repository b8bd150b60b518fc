"""The reading side of the ring: one engine rank, and what it leaves behind."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.incoming import IncomingStream
from verl_ckpt_engine.shm.segment import Segment, remove_if_orphaned, segment_path
from verl_ckpt_engine.shm.waiting import ProcessId
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo, TransferReport

if TYPE_CHECKING:
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Plan, WeightReceiver, WeightTarget

__all__ = ["ShmReceiver"]


class ShmReceiver:
    """One engine rank of the shm backend."""

    def __init__(self, *, owner: str, clock: Clock) -> None:
        """Make a receiver; create nothing yet."""
        self._owner = owner
        self._clock = clock
        self._rank = 0
        self._session: str | None = None
        self._lock = threading.Lock()
        self._stream: IncomingStream | None = None
        self._aborted: str | None = None

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Say which process will read. There is nothing to create: the file is the sender's."""
        self.close()
        self._session, self._rank, self._aborted = session, rank, None
        address = {"process": str(ProcessId.of_this_process())}
        return EndpointInfo(owner=self._owner, rank=rank, node=socket.gethostname(), address=address)

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole stream. Raises `WeightSyncError` for a cut, corrupt or incomplete one."""
        if self._session != plan.session:
            raise StateError(f"receive for session {plan.session!r}, but {self._session!r} was prepared")
        begun = self._clock.now()
        stream = IncomingStream(plan, self._place(plan), self._clock, deadline, lambda: self._aborted)
        self._stream = stream
        try:
            stream.enter()
            load = target.load(stream.items())
            stream.check_load(load)
            stream.finish()
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else stream.error(f"{type(exc).__name__}: {exc}")
            with self._lock:
                stream.fail(str(error))
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        return TransferReport(
            owner=self._owner,
            rank=self._rank,
            tensors=stream.tensors,
            num_bytes=stream.num_bytes,
            seconds=self._clock.now() - begun,
            digests=stream.digests,
            skipped=load.skipped,
        )

    def abort(self, reason: str, /) -> None:
        """Make a blocked `receive` raise, and tell the sender."""
        self._aborted = reason
        self._leave(f"aborted: {reason}")

    def close(self) -> None:
        """Let go of the ring, and remove its file if the sender is dead. Idempotent, legal in every state."""
        self._leave("the receiver closed before the end")
        with self._lock:
            stream, self._stream = self._stream, None
            session, self._session = self._session, None
        if stream is not None:
            stream.close()
        if session is not None:
            remove_if_orphaned(segment_path(session))

    def _place(self, plan: Plan) -> int:
        for index, receiver in enumerate(plan.receivers):
            if (receiver.owner, receiver.rank) == (self._owner, self._rank):
                return index
        raise WeightSyncError("transfer", f"{self._owner} rank {self._rank} is not in the plan")

    def _leave(self, reason: str) -> None:
        """Tell the sender that this rank is lost, also when it does not know its place in the ring yet."""
        with self._lock:
            if self._stream is not None:
                self._stream.fail(reason)
            elif self._session is not None:
                with suppress(OSError, ValueError):
                    segment = Segment.open(segment_path(self._session))
                    segment.depart(f"{self._owner} rank {self._rank}")
                    segment.close()


if TYPE_CHECKING:

    def _is_receiver(x: ShmReceiver) -> WeightReceiver:
        return x
