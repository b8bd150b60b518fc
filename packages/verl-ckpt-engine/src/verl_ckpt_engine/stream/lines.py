"""What two ranks say to each other about the bytes that travel beside: over TCP, between parent and child of a tree.

Owns connections and messages. A connection that ends tells of a death at once, on the same host and across hosts, and a
token keeps strangers out. Nothing here blocks; `wait` does, for all lines at once, and no longer than it is told.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from verl_ckpt_engine.stream.routes import HOST_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ACK", "DONE", "END", "FAIL", "FRAME", "HELLO", "WELCOME", "Line", "Listener", "Message", "own_host", "wait"]

HELLO: Final = 1
"""Child to parent: who it is, for which session."""
WELCOME: Final = 2
"""Parent to child: where the bytes will be found."""
FRAME: Final = 3
"""Parent to child: a bucket is there."""
ACK: Final = 4
"""Child to parent: a bucket is no longer needed."""
END: Final = 5
"""Parent to child: everything was sent; counts and digest."""
DONE: Final = 6
"""Child to parent: everything is loaded."""
FAIL: Final = 7
"""Either way: the session is over, and why."""

_HEADER: Final = struct.Struct("=IB")
_MOST_BYTES: Final = 64 * 1024 * 1024
_MOST_HELLO_BYTES: Final = 64 * 1024
_CHUNK: Final = 256 * 1024


class Message(NamedTuple):
    """One message."""

    kind: int
    body: bytes

    def fields(self) -> dict[str, str]:
        """Return a body of names and values. Raises ValueError for anything else."""
        found = json.loads(self.body)
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError(f"expected names and strings, got {found!r}")
        return cast("dict[str, str]", found)


class Line:
    """One connection. Messages arrive whole and in order, or the line is broken."""

    def __init__(self, connection: socket.socket, *, most_bytes: int = _MOST_BYTES) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._in = bytearray()
        self._out = bytearray()
        self.most_bytes = most_bytes
        """Longest message that is taken."""
        self.broken: str | None = None
        """Why nothing more can come."""

    @classmethod
    def connect(cls, host: str, port: int, limit_s: float) -> Line:
        """Return a line to a `Listener`. Raises OSError."""
        return cls(socket.create_connection((host, port), timeout=limit_s))

    def fileno(self) -> int:
        """Return what `select` takes; -1 when closed."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits to go out."""
        return bool(self._out) and self.broken is None

    def send(self, kind: int, body: bytes | Mapping[str, str] = b"") -> None:
        """Send as much as goes without waiting; the rest goes when the line is looked at again."""
        data = body if isinstance(body, bytes) else json.dumps(dict(body)).encode()
        self._out += _HEADER.pack(len(data), kind) + data
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it goes."""
        try:
            while self._out and self.broken is None:
                del self._out[: self._socket.send(self._out[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError as exc:
            self.broken = self.broken or str(exc)

    def receive(self) -> list[Message]:
        """Return the messages that have come."""
        self.flush()
        try:
            while data := self._socket.recv(_CHUNK):
                self._in += data
            self.broken = self.broken or "the other side closed the connection"
        except BlockingIOError:
            pass
        except OSError as exc:
            self.broken = self.broken or str(exc)
        messages = []
        while len(self._in) >= _HEADER.size:
            size, kind = _HEADER.unpack_from(self._in)
            if size > self.most_bytes:
                self.broken = f"a message of {size} bytes came"
                break
            if len(self._in) < _HEADER.size + size:
                break
            messages.append(Message(kind, bytes(self._in[_HEADER.size : _HEADER.size + size])))
            del self._in[: _HEADER.size + size]
        return messages

    def close(self) -> None:
        """End the line. Idempotent."""
        self.broken = self.broken or "closed here"
        self._socket.close()


class Listener:
    """Takes the lines of children that know the token."""

    def __init__(self, host: str) -> None:
        """Listen at `host`, a name or number of this machine, on a port that the system chooses."""
        self._socket = socket.create_server((host, 0))
        self._socket.setblocking(False)
        self.token = secrets.token_hex(16)
        self.address = {"host": host, "port": str(self._socket.getsockname()[1]), "token": self.token}
        """What children need."""
        self._waiting: list[Line] = []

    def sources(self) -> list[Listener | Line]:
        """Return what `wait` should look at."""
        return [self, *self._waiting]

    def fileno(self) -> int:
        """Return what `select` takes; -1 when closed."""
        return self._socket.fileno()

    def newcomers(self) -> list[tuple[Line, dict[str, str]]]:
        """Return the lines whose first message has come, each with what it says."""
        with suppress(OSError):  # nobody more, or closed
            while True:
                connection, _ = self._socket.accept()  # wait: it does not block
                self._waiting.append(Line(connection, most_bytes=_MOST_HELLO_BYTES))
        found = []
        for line in list(self._waiting):
            messages = line.receive()
            if messages or line.broken is not None:
                self._waiting.remove(line)
                said = self._hello(messages)
                if said is None:
                    line.close()
                else:
                    line.most_bytes = _MOST_BYTES
                    found.append((line, said))
        return found

    def _hello(self, messages: Sequence[Message]) -> dict[str, str] | None:
        """Return what a child says of itself; None for a stranger."""
        if not messages or messages[0].kind != HELLO:
            return None
        with suppress(ValueError):
            said = messages[0].fields()
            if hmac.compare_digest(said.get("token", ""), self.token):
                return said
        return None

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()
        for line in self._waiting:
            line.close()
        self._waiting.clear()


def wait(sources: Sequence[Line | Listener | socket.socket], limit_s: float) -> None:
    """Return when one of `sources` has something, or can take what waits in it, or after `limit_s`."""
    poll = select.poll()
    for source in sources:
        if source.fileno() >= 0:
            unsent = isinstance(source, Line) and source.unsent
            poll.register(source, select.POLLIN | (select.POLLOUT if unsent else 0))
    poll.poll(max(1, round(limit_s * 1000)))


def own_host() -> str:
    """Return the address at which other ranks reach this machine."""
    if found := os.environ.get(HOST_VARIABLE):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(("10.255.255.255", 1))  # sends nothing, and tells which address would be sent from
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
