"""The writing side: one trainer rank, and what it keeps between syncs.

Owns the ring. It is used again only after a send that went well: one that was given up may still be writing, and keeps
the ring to itself, while the next sync begins with a new one.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.outgoing import OutgoingStream
from verl_ckpt_engine.shm.ring import ENDED, FAILED, Ring
from verl_ckpt_engine.shm.waiting import ProcessId, process_scope
from verl_ckpt_engine.tally import SentTally
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo

if TYPE_CHECKING:
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Manifest, Plan, TransferReport, WeightSender, WeightSource

__all__ = ["ShmSender"]

_MOST_IDLE = 2
"""A ring is kept as long as it is no more than this many times as large as the last sync needed."""


class _Session:
    """One sync of a sender, with the ring that it writes to; rank 0 alone has one."""

    def __init__(self, ring: Ring | None, generation: int) -> None:
        self.ring = ring
        self.generation = generation
        self.stopped: str | None = None
        self.needed_bytes = 0
        self.begun = False
        self.complete = False
        self._lock = threading.Lock()

    def stop(self, reason: str) -> None:
        """Make a send that runs raise, and tell the readers; harmless when it is over."""
        with self._lock:
            if self.complete:
                return
            self.stopped = self.stopped or reason
            if self.ring is not None and self.ring.state not in (ENDED, FAILED):
                self.ring.fail(self.stopped)

    @property
    def reusable(self) -> bool:
        """Whether nobody writes to the ring any more, and its size suits."""
        if self.ring is None or self.ring.memory.named or (self.begun and not self.complete):
            return False
        return not self.complete or len(self.ring.memory) <= _MOST_IDLE * self.needed_bytes


class ShmSender:
    """One trainer rank of the shm backend: rank 0 writes, the others only take part in gathering."""

    def __init__(self, *, owner: str, rank: int, clock: Clock, keep_ring: bool = True) -> None:
        """Make a sender; create nothing yet.

        With `keep_ring` the memory stays between syncs, so that its pages are touched for the first time once only;
        else every `close` gives it back.
        """
        self._owner = owner
        self._rank = rank
        self._clock = clock
        self._keep_ring = keep_ring
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._kept: Ring | None = None
        self._generation = 0

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Have a ring for this session; it gets its size once the plan is known."""
        self.close()
        address = {"process": str(ProcessId.of_this_process()), "scope": process_scope()}
        with self._lock:
            self._generation += 1
            ring, self._kept = self._kept, None
            if self._rank == 0:
                ring = ring or Ring.create()
                ring.begin(self._generation)
                address |= {"generation": str(self._generation), **ring.memory.address}
            self._session = _Session(ring, self._generation)
        return EndpointInfo(owner=self._owner, rank=self._rank, node=socket.gethostname(), address=address)

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Stream everything. Raises `WeightSyncError` naming the missing peers, at the deadline at the latest.

        Returns when every reader that is still listened to has said that it loaded everything.
        """
        with self._lock:
            session = self._session
            if session is None:
                raise StateError("send before prepare, or after close: the session does not exist")
            if session.begun:
                raise StateError(f"session {plan.session!r} was sent already; prepare another one")
            session.begun = True
        begun = self._clock.now()
        if session.ring is None:
            self._drain(session, source, deadline)
            return SentTally(plan).report(self._owner, self._rank, self._clock.now() - begun)
        stream = OutgoingStream(
            session.ring, session.generation, plan, self._clock, deadline, stopped=lambda: session.stopped
        )
        session.needed_bytes = stream.total_bytes
        items = source.tensors()
        try:
            stream.open()
            for meta, tensor in items:
                stream.write(meta, tensor)
            stream.end()
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else stream.error(f"{type(exc).__name__}: {exc}")
            session.stop(error.reason)
            if len(plan.senders) > 1:
                # The other ranks gather until their iteration ends; leaving now would block them.
                for _ in items:
                    pass
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        session.complete = True
        return stream.tally.report(self._owner, self._rank, self._clock.now() - begun)

    def abort(self, reason: str, /) -> None:
        """Make a blocked `send` raise, and tell the receivers."""
        session = self._session
        if session is not None:
            session.stop(f"aborted: {reason}")

    def close(self) -> None:
        """End the session; receivers that still read are told. Idempotent, legal in every state."""
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
            session.stop("the sender closed before the end")
            if session.ring is None:
                return
            if self._keep_ring and session.reusable:
                self._kept = session.ring
            else:
                session.ring.memory.unlink()

    def _drain(self, session: _Session, source: WeightSource, deadline: Deadline) -> None:
        for meta, _ in source.tensors():
            if session.stopped is not None:
                raise WeightSyncError("transfer", session.stopped, meta.name)
            if not deadline.remaining(self._clock):
                raise WeightSyncError("transfer", f"not gathered within {deadline.limit_s:.3g} s", meta.name)


if TYPE_CHECKING:

    def _is_sender(x: ShmSender) -> WeightSender:
        return x
