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
                with self._listener.accept() as connection:  # wait: a thread that does nothing else, ended by `close`
                    self._answer(connection)
            except EOFError:
                continue  # the replica is gone; the next one may come
            except OSError:
                return  # closed

    def _answer(self, connection: Connection) -> None:
        while True:
            method, arguments = connection.recv()  # wait: ends when the replica does
            if method == _END:
                self.close()
                connection.send((True, None))
                return
            try:
                reply = (True, self._methods[method](**arguments))
            except Exception as exc:
                reply = (False, exc)
            try:
                connection.send(reply)
            except (TypeError, AttributeError) as exc:  # a value or an error that cannot be pickled
                connection.send((False, WeightSyncError("transfer", f"{reply[1]!r} ({exc})")))


class ControlClient:
    """The replica's end, for one worker. Blocking; may be called from several threads."""

    def __init__(self, path: str, key: bytes, *, rank: int, limit_s: float) -> None:
        """Connect. Raises `WeightSyncError` when the worker does not listen within `limit_s`."""
        self._rank = rank
        self._lock = threading.Lock()
        end = time.monotonic() + limit_s
        while True:
            try:
                self._connection = Client(path, family="AF_UNIX", authkey=key)
                return
            except (FileNotFoundError, ConnectionRefusedError) as exc:
                if time.monotonic() > end:
                    raise self._gone(f"does not listen after {limit_s:g} s") from exc
                time.sleep(_LOOK_AGAIN_S)

    def call(self, method: str, arguments: Mapping[str, object], /, *, limit_s: float) -> object:
        """Return what the worker's `method` returns; raise what it raises, `WeightSyncError` when it is gone."""
        with self._lock:
            try:
                self._connection.send((method, dict(arguments)))
                if not self._connection.poll(limit_s):
                    self._connection.close()
                    raise self._gone(f"has not answered {method} for {limit_s:g} s")
                done, value = self._connection.recv()
            except (EOFError, OSError) as exc:
                raise self._gone(f"is gone: {type(exc).__name__}") from exc
        if done:
            return value
        raise value

    def close(self) -> None:
        """Let the worker listen no more, and hang up. Idempotent; a worker that is gone is no error."""
        with contextlib.suppress(OSError, WeightSyncError):
            self.call(_END, {}, limit_s=_END_LIMIT_S)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _gone(self, what: str) -> WeightSyncError:
        return WeightSyncError("transfer", f"the vLLM worker of rank {self._rank} {what}")
