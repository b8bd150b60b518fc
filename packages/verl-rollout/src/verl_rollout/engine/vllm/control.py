"""How a replica speaks with the receivers inside vLLM's workers, past vLLM's own queue of calls.

A worker that loads weights is blocked in that call, and vLLM sends it nothing else; yet an abort has to reach it, and
its report, or its error with cause, has to come back whole. So each worker serves a socket in a private folder of its
replica. Both ends are processes of one replica on one machine; nobody else may open the folder, and a key is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import WeightSyncError
from verl_contracts.weights import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

__all__ = ["ControlClient", "ControlServer", "socket_path"]

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.05
_END = "end"
_END_LIMIT_S = 5.0


def socket_path(folder: str, rank: int) -> str:
    """Return where the worker of `rank` listens."""
    return str(Path(folder) / f"{rank}.sock")


class ControlServer:
    """The worker's end: answers named calls on a thread of its own, one caller at a time."""

    def __init__(self, path: str, key: bytes, methods: Mapping[str, Callable[..., object]]) -> None:
        self._methods = methods
        self._listener = Listener(path, family="AF_UNIX", authkey=key)
        threading.Thread(target=self._serve, name="verl-weight-control", daemon=True).start()

    def close(self) -> None:
        """Listen no more. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()  # wait: a thread that does nothing else, ended by `close`
            except OSError:
                return  # closed
            with connection, contextlib.suppress(EOFError, OSError):  # the replica is gone; the next one may come
                self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        while True:
            number, method, arguments = connection.recv()  # wait: ends when the replica does
            if method == _END:
                self.close()
                connection.send((number, True, None))
                return
            try:
                done, value = True, self._methods[method](**arguments)
            except Exception as exc:
                done, value = False, exc
            try:
                connection.send((number, done, value))
            except (TypeError, AttributeError) as exc:  # a value or an error that cannot be pickled
                connection.send((number, False, WeightSyncError(_phase(method), f"{value!r} ({exc})")))


class ControlClient:
    """The replica's end, for one worker. Blocking; may be called from several threads."""

    def __init__(self, path: str, key: bytes, *, rank: int, limit_s: float) -> None:
        """Connect. Raises `WeightSyncError` when the worker does not listen within `limit_s`."""
        self._rank = rank
        self._lock = threading.Lock()
        self._calls = 0
        end = time.monotonic() + limit_s
        while True:
            try:
                self._connection = Client(path, family="AF_UNIX", authkey=key)
                return
            except (FileNotFoundError, ConnectionRefusedError) as exc:
                if time.monotonic() > end:
                    raise self._error("prepare", f"does not listen after {limit_s:g} s") from exc
                time.sleep(_LOOK_AGAIN_S)

    def call(self, method: str, arguments: Mapping[str, object], /, *, limit_s: float) -> object:
        """Return what the worker's `method` returns; raise what it raises, `WeightSyncError` when it is gone.

        One that is late is not gone: its answer is passed over when it comes.
        """
        end = time.monotonic() + limit_s
        with self._lock:
            self._calls += 1
            try:
                self._connection.send((self._calls, method, dict(arguments)))
                while True:
                    if not self._connection.poll(max(0.0, end - time.monotonic())):
                        raise self._error(method, f"has not answered {method} for {limit_s:.3g} s")
                    number, done, value = self._connection.recv()
                    if number == self._calls:
                        break
            except (EOFError, OSError) as exc:
                raise self._error(method, f"is gone: {type(exc).__name__}") from exc
        if done:
            return value
        raise value

    def close(self) -> None:
        """Let the worker listen no more, and hang up. Idempotent; a worker that is gone is no error."""
        with contextlib.suppress(OSError, WeightSyncError):
            self.call(_END, {}, limit_s=_END_LIMIT_S)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _error(self, method: str, what: str) -> WeightSyncError:
        return WeightSyncError(_phase(method), f"the vLLM worker of rank {self._rank} {what}")


def _phase(method: str) -> str:
    return method if method in PHASES else "transfer"
