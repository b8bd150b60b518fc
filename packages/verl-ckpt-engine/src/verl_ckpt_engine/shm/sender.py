"""The writing side of the ring: one trainer rank, and what it creates and removes."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.outgoing import OutgoingStream
from verl_ckpt_engine.shm.segment import ENDED, FAILED, Segment, segment_path
from verl_ckpt_engine.shm.waiting import ProcessId
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo, TransferReport

if TYPE_CHECKING:
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Manifest, Plan, WeightSender, WeightSource

__all__ = ["ShmSender"]


class ShmSender:
    """One trainer rank of the shm backend: rank 0 writes, the others only take part in gathering."""

    def __init__(self, *, owner: str, rank: int, clock: Clock) -> None:
        """Make a sender; create nothing yet."""
        self._owner = owner
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._manifest: Manifest | None = None
        self._aborted: str | None = None

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Create the file of this session; it gets its size once the plan is known."""
        self.close()
        process = ProcessId.of_this_process()
        self._aborted = None
        self._manifest = manifest
        address = {"process": str(process)}
        if self._rank == 0:
            self._segment = Segment.create(segment_path(session), process)
            address["segment"] = str(self._segment.path)
        return EndpointInfo(owner=self._owner, rank=self._rank, node=socket.gethostname(), address=address)

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Stream everything. Raises `WeightSyncError` naming the missing peers, at the deadline at the latest.

        Returns when every reader that is still listened to has said that it loaded everything.
        """
        if self._manifest is None:
            raise StateError("send before prepare: the session does not exist")
        begun = self._clock.now()
        if self._rank != 0:
            self._drain(source, deadline)
            return self._report(begun, tensors=0, num_bytes=0, digests={})
        segment = self._segment
        if segment is None:
            raise StateError("send after close: the session does not exist any more")
        stream = OutgoingStream(segment, plan, self._clock, deadline, lambda: self._aborted)
        items = source.tensors()
        try:
            for meta, tensor in items:
                stream.write(meta, tensor)
            stream.end()
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else stream.error(f"{type(exc).__name__}: {exc}")
            self._fail(error.reason, segment)
            if len(plan.senders) > 1:
                # The other ranks gather until their iteration ends; leaving now would block them.
                for _ in items:
                    pass
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        return self._report(begun, tensors=stream.tensors, num_bytes=stream.num_bytes, digests=stream.digests)

    def abort(self, reason: str, /) -> None:
        """Make a blocked `send` raise, and tell the receivers."""
        self._aborted = reason
        self._fail(f"aborted: {reason}", self._segment)

    def close(self) -> None:
        """Remove the file. Idempotent, legal in every state; receivers that still read are told."""
        self._fail("the sender closed before the end", self._segment)
        with self._lock:
            segment, self._segment, self._manifest = self._segment, None, None
            if segment is not None:
                segment.unlink()
                segment.close()

    def _fail(self, reason: str, segment: Segment | None) -> None:
        """Tell the readers of `segment`, unless it was closed meanwhile: a late send must not fail its successor."""
        with self._lock:
            if segment is not None and segment is self._segment and segment.state not in (ENDED, FAILED):
                segment.set_sender_words(reason)
                segment.state = FAILED

    def _drain(self, source: WeightSource, deadline: Deadline) -> None:
        for meta, _ in source.tensors():
            if self._aborted is not None:
                raise WeightSyncError("transfer", f"aborted: {self._aborted}", meta.name)
            if not deadline.remaining(self._clock):
                raise WeightSyncError("transfer", f"not gathered within {deadline.limit_s:.3g} s", meta.name)

    def _report(self, begun: float, *, tensors: int, num_bytes: int, digests: dict[str, int]) -> TransferReport:
        return TransferReport(
            owner=self._owner,
            rank=self._rank,
            tensors=tensors,
            num_bytes=num_bytes,
            seconds=self._clock.now() - begun,
            digests=digests,
        )


if TYPE_CHECKING:

    def _is_sender(x: ShmSender) -> WeightSender:
        return x
