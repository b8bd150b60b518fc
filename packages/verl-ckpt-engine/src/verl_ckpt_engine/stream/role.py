"""What senders and receivers of the stream have in common: sessions, and what is kept between them."""

from __future__ import annotations

import socket
import threading
import weakref
from typing import TYPE_CHECKING, ClassVar

from verl_ckpt_engine.stream.node import Node
from verl_ckpt_engine.tally import size_of
from verl_contracts.errors import StateError
from verl_contracts.weights import EndpointInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_ckpt_engine.stream.medium import Medium
    from verl_contracts.clock import Clock
    from verl_contracts.weights import Plan

__all__ = ["ALIGNMENT", "Role", "slot_bytes"]

ALIGNMENT = 64
"""Every payload begins at a multiple of this, so that it can be viewed in any dtype."""


class _Session:
    """One sync of one rank."""

    def __init__(self, name: str, node: Node) -> None:
        self.name = name
        self.node = node
        self.running = False
        self.complete = False


class Role:
    """One rank of a backend of the stream. Subclasses name the medium."""

    medium: ClassVar[Callable[[], Medium]]

    def __init__(self, *, owner: str, rank: int, clock: Clock) -> None:
        self._owner = owner
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._kept: Node | None = None

    def _prepare(self, session: str) -> EndpointInfo:
        self.close()
        with self._lock:
            node, self._kept = self._kept, None
            if node is None:
                node = Node(type(self).medium(), self._clock)
                weakref.finalize(self, node.close)  # threads of edges would keep it for ever
            self._session = _Session(session, node)
        return EndpointInfo(owner=self._owner, rank=self._rank, node=socket.gethostname(), address=node.address)

    def _begin(self, plan: Plan) -> _Session:
        with self._lock:
            session = self._session
            if session is None or session.name != plan.session:
                prepared = None if session is None else session.name
                raise StateError(f"the plan is for session {plan.session!r}, and {prepared!r} was prepared")
            if session.running or session.complete:
                raise StateError(f"session {plan.session!r} was used already; prepare another one")
            session.running = True
            return session

    def _end(self, session: _Session, failure: str | None) -> None:
        """Keep what can be used again after a session that went well, unless it was closed meanwhile."""
        if failure is not None:
            session.node.fail(failure)
        with self._lock:
            session.running = False
            session.complete = failure is None
            if self._session is not session and failure is None:
                session.node.close()

    def abort(self, reason: str, /) -> None:
        """Make what blocks raise, and tell the other side."""
        session = self._session
        if session is not None and not session.complete:
            session.node.stop(f"aborted: {reason}")

    def close(self) -> None:
        """End the session; who still waits for us is told. Idempotent, legal in every state."""
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
            if session.complete:
                self._kept = session.node
            elif session.running:
                session.node.stop("closed before the end")  # it gives everything back itself
            else:
                session.node.fail("closed before the end")


def slot_bytes(plan: Plan) -> int:
    """Return the size of a bucket: what is allowed, or less where everything fits."""
    needed = sum(-(-size_of(meta) // ALIGNMENT) * ALIGNMENT for meta in plan.manifest.tensors)
    return max(ALIGNMENT, min(plan.bucket_bytes, needed))
