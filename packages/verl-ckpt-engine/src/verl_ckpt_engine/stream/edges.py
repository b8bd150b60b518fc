"""One edge of the tree: a line for what is said, and beside it the way that bytes take, with a thread of its own."""

from __future__ import annotations

import atexit
import queue
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_ckpt_engine.stream.lines import Line
    from verl_ckpt_engine.stream.medium import Inlet, Outlet

__all__ = ["Edge", "Wake"]

E = TypeVar("E", bound="Outlet | Inlet")

_EXIT_LIMIT_S: Final = 5.0
"""Longest that the end of the process waits for one edge."""
_working: set[Edge[Any]] = set()
"""Edges whose thread runs."""


class Wake:
    """Ends a `wait` from another thread."""

    def __init__(self) -> None:
        self.source, self._from = socket.socketpair()
        self.source.setblocking(False)
        self._from.setblocking(False)

    def set(self) -> None:
        """Wake; harmless when it is closed, or was set."""
        with suppress(OSError):
            self._from.send(b"\0")

    def clear(self) -> None:
        """Forget what was set."""
        with suppress(OSError):
            self.source.recv(4096)

    def close(self) -> None:
        """Give it back. Idempotent."""
        self.source.close()
        self._from.close()


class Edge(Generic[E]):
    """What connects this rank to one neighbour."""

    def __init__(self, line: Line, end: E, wake: Wake) -> None:
        self.line = line
        self.end = end
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Do `job` on the edge's thread, after the jobs before it."""
        if self._thread is None:
            # A daemon: what blocks in a transport is not to keep a process alive that wants to end.
            self._thread = threading.Thread(target=self._body, name="verl-weights-edge", daemon=True)
            _working.add(self)
            self._thread.start()
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """End the line at once, and the other end as soon as the thread gets to it. Idempotent."""
        self.line.close()
        if self._closed:
            return
        self._closed = True
        self.end.cut()
        if self._thread is None:
            self.end.close()
        else:
            self._jobs.put(None)

    def _body(self) -> None:
        while (found := self._jobs.get()) is not None:  # wait: for work; `close` ends it
            job, future = found
            if self._closed:
                future.cancel()
                continue
            try:
                job()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(None)
            self._wake.set()
        self.end.close()
        _working.discard(self)

    def join(self, limit_s: float) -> None:
        """Wait for the thread of an edge that was closed, but no longer than `limit_s`."""
        if self._thread is not None:
            self._thread.join(limit_s)


@atexit.register
def _end_all() -> None:
    """End the threads: an interpreter that goes away under one that is inside a transport takes the process down."""
    edges = list(_working)
    for edge in edges:
        edge.close()
    for edge in edges:
        edge.join(_EXIT_LIMIT_S)
