"""The reading side: one engine rank, and what it keeps between syncs.

Owns the rank's page and its mapping of the ring. Both are used again only after a receive that went well: while one
that was given up may still run, it keeps its own, and the next sync begins with new ones.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.incoming import IncomingStream
from verl_ckpt_engine.shm.page import ReaderPage
from verl_ckpt_engine.shm.waiting import ProcessId, process_scope
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo

if TYPE_CHECKING:
    from verl_ckpt_engine.shm.ring import Ring
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Plan, TransferReport, WeightReceiver, WeightTarget

__all__ = ["ShmReceiver"]


class ShmReceiver:
    """One engine rank of the shm backend. Keep it for all syncs: a new one has to map the ring again."""

    def __init__(self, *, owner: str, clock: Clock, keep_ring: bool = True) -> None:
        """Make a receiver; create nothing yet. With `keep_ring` it stays mapped between syncs, else it is let go."""
        self._owner = owner
        self._clock = clock
        self._keep_ring = keep_ring
        self._rank = 0
        self._session: str | None = None
        self._sessions = 0
        self._lock = threading.Lock()
        self._stream: IncomingStream | None = None
        self._page: ReaderPage | None = None
        self._ring: Ring | None = None
        self._refused: str | None = None
        """Why nothing may be received: it was aborted before it began."""

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Say where the sender finds our page."""
        self.close()
        with self._lock:
            self._session, self._rank, self._refused = session, rank, None
            self._sessions += 1
            page = self._page = self._page or ReaderPage.create()
            page.begin(self._sessions)
        address = {
            "process": str(ProcessId.of_this_process()),
            "scope": process_scope(),
            "session": str(self._sessions),
            **page.memory.address,
        }
        return EndpointInfo(owner=self._owner, rank=rank, node=socket.gethostname(), address=address)

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole stream. Raises `WeightSyncError` for a cut, corrupt or incomplete one."""
        begun = self._clock.now()
        stream, known = self._begin(plan, deadline)
        try:
            ring = stream.enter(known)
            load = target.load(stream.items(ring))
            stream.check_load(load)
            stream.finish(ring)
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else stream.error(f"{type(exc).__name__}: {exc}")
            stream.stop(str(error))
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        self._end(stream, ring)
        return stream.tally.report(self._owner, self._rank, self._clock.now() - begun, load.skipped)

    def abort(self, reason: str, /) -> None:
        """Make a blocked `receive` raise, and tell the sender."""
        self._leave(f"aborted: {reason}")

    def close(self) -> None:
        """End the session; a sender that still waits for us is told. Idempotent, legal in every state."""
        self._leave("the receiver closed before the end")
        with self._lock:
            self._session = None
            if self._stream is not None:
                # It failed, or still runs: what it holds goes with it.
                self._stream = self._ring = None
                self._drop_page()
            elif not self._keep_ring:
                self._ring = None
                self._drop_page()

    def _begin(self, plan: Plan, deadline: Deadline) -> tuple[IncomingStream, Ring | None]:
        with self._lock:
            if self._session != plan.session or self._page is None:
                raise StateError(f"receive for session {plan.session!r}, but {self._session!r} was prepared")
            if self._stream is not None:
                raise StateError(f"session {plan.session!r} was received already; prepare another one")
            stream = IncomingStream(plan, self._place(plan), self._page, self._clock, deadline)
            self._stream = stream
            if self._refused is not None:
                stream.stop(self._refused)
            return stream, self._ring

    def _end(self, stream: IncomingStream, ring: Ring) -> None:
        """Keep what can be used again, unless the session was closed meanwhile."""
        with self._lock:
            if self._stream is stream:
                self._stream, self._ring = None, ring
                self._session = None

    def _place(self, plan: Plan) -> int:
        for index, receiver in enumerate(plan.receivers):
            if (receiver.owner, receiver.rank) == (self._owner, self._rank):
                return index
        raise WeightSyncError("transfer", f"{self._owner} rank {self._rank} is not in the plan")

    def _leave(self, reason: str) -> None:
        """Tell the sender that this rank is lost, unless it is done."""
        with self._lock:
            if self._stream is not None:
                self._stream.stop(reason)
            elif self._session is not None and self._page is not None:
                self._refused = self._refused or reason
                self._page.fail(self._refused)

    def _drop_page(self) -> None:
        if self._page is not None:
            self._page.memory.unlink()
        self._page = None


if TYPE_CHECKING:

    def _is_receiver(x: ShmReceiver) -> WeightReceiver:
        return x
