"""What the guard lets through, and what it does to an answer on its way back. No vLLM: the app is a few lines here."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from verl_contracts.rollout import DEAD, INVALID, SERVING, ReplicaState, ReplicaStatus
from verl_rollout.engine.vllm.openai_guard import EXCHANGE, LAST_VERSION_HEADER, ROUTES, VERSION_HEADER, Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_rollout.engine.vllm.openai_guard import Exchange, Message, Receive, Send

KEY = "k" * 43
CHAT = ("POST", "/v1/chat/completions")


@dataclass
class App:
    """Answers with two parts of a body, between which the engine may speak up."""

    meet: Callable[[Exchange], None] = lambda exchange: exchange.note([4])
    seen: list[tuple[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.seen.append((str(scope["method"]), str(scope["path"])))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        self.meet(EXCHANGE.get())
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    heads: int = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.heads += 1
            self.status = cast("int", message["status"])
            found = cast("list[tuple[bytes, bytes]]", message["headers"])
            self.headers = {name.decode(): value.decode() for name, value in found}
        else:
            self.body += cast("bytes", message["body"])


def ask(
    app: App,
    route: tuple[str, str] = CHAT,
    *,
    authorization: str | None = f"Bearer {KEY}",
    state: ReplicaState = SERVING,
    version: int | None = 7,
) -> Answer:
    """Return the answer to one request."""
    status = ReplicaStatus(replica="r0", state=state, version=version, running=0, waiting=0, generated_tokens=0)
    headers = [] if authorization is None else [(b"Authorization", authorization.encode())]
    scope: Message = {"type": "http", "method": route[0], "path": route[1], "headers": headers}
    answer = Answer()

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(Guard(app, api_key=KEY, status=lambda: status)(scope, nothing, answer.send))
    assert answer.heads == 1
    return answer


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_the_key_opens_every_listed_route(authorization: str) -> None:
    app = App()
    for route in sorted(ROUTES):
        answer = ask(app, route, authorization=authorization)
        assert (answer.status, answer.body) == (200, b"one two")
    assert app.seen == sorted(ROUTES)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}", f"Bearer {KEY}k", "Bearer \xff"],
)
@pytest.mark.parametrize("route", [CHAT, ("GET", "/v1/models"), ("GET", "/nothing")])
def test_without_the_key_nothing_reaches_the_app(authorization: str | None, route: tuple[str, str]) -> None:
    app = App()
    answer = ask(app, route, authorization=authorization)
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert app.seen == []
    assert VERSION_HEADER not in answer.headers


@pytest.mark.parametrize(
    "route",
    [
        ("GET", "/v1/completions"),
        ("POST", "/v1/completions/"),
        ("POST", "/sleep"),
        ("POST", "/v1/responses"),
        ("GET", ""),
    ],
)
def test_what_is_not_listed_is_not_found(route: tuple[str, str]) -> None:
    app = App()
    assert ask(app, route).status == 404
    assert app.seen == []


def test_anybody_may_ask_for_the_health() -> None:
    app = App()
    for state, expected in ((SERVING, 200), (INVALID, 200), (DEAD, 503)):
        answer = ask(app, ("GET", "/health"), authorization=None, state=state)
        assert (answer.status, json.loads(answer.body)) == (
            expected,
            {"status": "dead" if state == DEAD else "alive"},
        )
    assert app.seen == []


def test_a_dead_replica_is_unavailable() -> None:
    app = App()
    answer = ask(app, state=DEAD)
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (503, "replica r0 is dead")
    assert app.seen == []


@pytest.mark.parametrize(
    ("noted", "version", "expected"),
    [
        ([4], 7, {VERSION_HEADER: "4"}),
        ([4, 4, 6], 7, {VERSION_HEADER: "4", LAST_VERSION_HEADER: "6"}),
        ([], 7, {VERSION_HEADER: "7"}),
        ([], None, {}),
    ],
)
def test_an_answer_says_which_weights_made_it(noted: list[int], version: int | None, expected: dict[str, str]) -> None:
    answer = ask(App(lambda exchange: exchange.note(noted)), version=version)
    assert answer.headers == {"content-type": "text/plain", **expected}


def test_what_the_engine_refuses_replaces_an_answer_that_has_no_body_yet() -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.refused = (503, "it sleeps")

    answer = ask(App(refuse))
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (503, "it sleeps")
    assert answer.headers["content-type"] == "application/json"


def test_other_protocols_are_refused() -> None:
    async def never() -> Message:
        raise AssertionError

    with pytest.raises(ValueError, match="websocket"):
        asyncio.run(
            Guard(App(), api_key=KEY, status=lambda: pytest.fail("asked"))({"type": "websocket"}, never, Answer().send)
        )
