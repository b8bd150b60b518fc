"""What stands before vLLM's HTTP app: who may ask, for what, and with which weights the answer was made.

Knows ASGI and nothing of vLLM. The failure that it prevents is a server beside the engine's own face: open to everybody
on the machine, with routes that put a replica to sleep, and with answers that do not say which weights they are from.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from verl_contracts.rollout import DEAD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verl_contracts.rollout import ReplicaStatus

__all__ = [
    "EXCHANGE",
    "HEALTH",
    "LAST_VERSION_HEADER",
    "ROUTES",
    "VERSION_HEADER",
    "Exchange",
    "Guard",
    "Message",
    "Receive",
    "Send",
]

Message: TypeAlias = MutableMapping[str, object]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

HEALTH: Final = ("GET", "/health")
"""Answered to anybody: 200, or 503 when the engine is dead."""
ROUTES: Final = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    }
)
"""All else that is answered, and only to who knows the key."""
VERSION_HEADER: Final = "x-verl-weight-version"
"""Version of the weights under which an answer was begun; of an answer without tokens, the present one."""
LAST_VERSION_HEADER: Final = "x-verl-last-weight-version"
"""Version of an answer's last token, where it is another one and the answer was not streamed."""


@dataclass(slots=True)
class Exchange:
    """One HTTP request, as far as the engine knows it."""

    version: int | None = None
    """Weights under which it was begun."""
    last: int | None = None
    """Newest weights that one of its tokens came from."""
    refused: tuple[int, str] | None = None
    """Status and reason, when the engine would not take it."""

    def note(self, versions: Iterable[int]) -> None:
        """Note that weights of these versions made tokens of it."""
        for version in versions:
            self.version = version if self.version is None else min(self.version, version)
            self.last = version if self.last is None else max(self.last, version)


EXCHANGE: ContextVar[Exchange] = ContextVar("exchange")
"""The request that the current task answers. Tasks that it starts share the object."""


class Guard:
    """An ASGI app around another one."""

    def __init__(self, app: App, *, api_key: str, status: Callable[[], ReplicaStatus]) -> None:
        self._app = app
        self._authorization = f"Bearer {api_key}".encode()
        self._status = status

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is answered here, not {scope['type']!r}")
        route = (str(scope["method"]), str(scope["path"]))
        status = self._status()
        if route == HEALTH:
            code, word = (503, "dead") if status.state == DEAD else (200, "alive")
            await _respond(send, code, {"status": word})
        elif not self._may(scope):
            await _refuse(send, 401, "a bearer token is needed, and this is not the one", code="invalid_api_key")
        elif route not in ROUTES:
            await _refuse(send, 404, f"{' '.join(route)} is not answered here", code="not_found")
        elif status.state == DEAD:
            await _refuse(send, 503, f"replica {status.replica} is dead")
        else:
            exchange = Exchange()
            EXCHANGE.set(exchange)
            await self._app(scope, receive, _Reply(send, exchange, self._status).send)

    def _may(self, scope: Message) -> bool:
        """Return whether the request has the key; takes equally long for every wrong one."""
        headers = cast("Iterable[tuple[bytes, bytes]]", scope["headers"])
        given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return compare_digest(scheme.title() + b" " + key.strip(), self._authorization)


class _Reply:
    """Holds the head of a reply back until the first part of its body: by then it is known what the engine made of it.

    Of a stream, vLLM sends the head before it asks the engine for anything.
    """

    def __init__(self, send: Send, exchange: Exchange, status: Callable[[], ReplicaStatus]) -> None:
        self._send = send
        self._exchange = exchange
        self._status = status
        self._head: Message | None = None
        self._replaced = False

    async def send(self, message: Message) -> None:
        """Pass on what the app sends, unless the engine has refused."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        head, self._head = self._head, None
        if head is not None:
            refused = self._exchange.refused
            if refused is not None:
                self._replaced = True
                await _refuse(self._send, *refused)
                return
            head["headers"] = [*cast("Iterable[tuple[bytes, bytes]]", head.get("headers", ())), *self._versions()]
            await self._send(head)
        if not self._replaced:
            await self._send(message)

    def _versions(self) -> list[tuple[bytes, bytes]]:
        first, last = self._exchange.version, self._exchange.last
        if first is None:
            first = self._status().version
        found = [(VERSION_HEADER, first)] if first is not None else []
        if last != first and last is not None:
            found.append((LAST_VERSION_HEADER, last))
        return [(name.encode(), str(version).encode()) for name, version in found]


async def _refuse(send: Send, status: int, message: str, *, code: str | None = None) -> None:
    """Answer an error in the form that OpenAI's clients read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    await _respond(send, status, {"error": {"message": message, "type": kind, "param": None, "code": code}})


async def _respond(send: Send, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
