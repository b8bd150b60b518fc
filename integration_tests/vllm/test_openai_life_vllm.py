"""A replica's HTTP server from its start to its end: who starts it, whom it answers, what its end leaves."""

from __future__ import annotations

import ast
import asyncio
import json
import multiprocessing
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import openai
import pytest
from chats import ask, client_of, in_vllm, served, settings, unsynced
from shared import CLOCK, on_loop, send, serving, settings_of, soon, update, weights_of

from verl_contracts.errors import ConfigError, StateError
from verl_contracts.rollout import OPENAI
from verl_contracts.runtime import RuntimeSettings
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.tensors import ListSource
from verl_rollout.engine.vllm import openai_server
from verl_rollout.engine.vllm.engine import VLLMEngine
from verl_rollout.engine.vllm.options import VLLMOptions
from verl_rollout.manager import ReplicaManager
from verl_runtime.local import LocalRuntime

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl_contracts.rollout import OpenAIEndpoint, SupportsOpenAI

README = Path(__file__).parents[2] / "packages" / "verl-rollout" / "README.md"


def test_only_who_has_the_key_may_ask_and_only_for_what_is_listed(words: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with unsynced(words[0]) as (_, endpoint):
            root = endpoint.base_url.removesuffix("/v1")
            for key in ("", "wrong", endpoint.api_key[:-1], endpoint.api_key + "a"):
                async with client_of(endpoint, api_key=key or "-") as client:
                    with pytest.raises(openai.AuthenticationError, match="bearer token"):
                        await ask(client, endpoint.model)
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
            assert endpoint.api_key not in repr(endpoint)
            for path in ("/v1/models", "/v1/nothing", "/sleep", "/metrics", "/docs"):
                assert (await get(f"{root}{path}"))[0] == 401
            for path in ("/v1/responses", "/sleep", "/pause", "/collective_rpc", "/start_profile", "/update_weights"):
                status, body = await get(f"{root}{path}", key=endpoint.api_key, data=b"{}")
                assert status == 404
                assert "not_found" in str(body)
            for path in ("/metrics", "/docs", "/openapi.json", "/v1/models/", "/v1/../sleep", "//v1/models"):
                assert (await get(f"{root}{path}", key=endpoint.api_key))[0] == 404
            assert await get(f"{root}/health") == (200, {"status": "alive"})
            assert (await get(f"{root}/v1/models", key=endpoint.api_key))[0] == 200

    on_loop(case())


async def get(url: str, *, key: str | None = None, data: bytes | None = None) -> tuple[int, object]:
    """Return status and body; POST when there is data."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def fetch() -> tuple[int, object]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=30.0) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, json.load(exc)

    return await asyncio.to_thread(fetch)


def test_closing_answers_who_is_there_and_leaves_no_socket(words: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            running = asyncio.create_task(ask(client, model, max_tokens=600))
            await in_vllm(engine)
            endpoint = await engine.openai_endpoint(deadline=soon())
            assert any("uvicorn" in repr(task) for task in asyncio.all_tasks())
            assert endpoint == await engine.openai_endpoint(deadline=soon())
            async with asyncio.timeout(10.0):
                await engine._openai.close()
            assert len((await running)[0]) < 600
            parts = urlsplit(endpoint.base_url)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5.0).close()
            assert not any("uvicorn" in repr(task) for task in asyncio.all_tasks())
            await engine._openai.close()

    on_loop(case())


def test_a_manager_starts_the_endpoints_and_gives_their_addresses(words: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        events = RecordingEvents(CLOCK)
        runtime = await LocalRuntime.create(RuntimeSettings(run_id="vllm"), clock=CLOCK, events=events)
        try:
            manager = await ReplicaManager.create(
                settings(words[0]),
                runtime=runtime,
                grant=None,
                start_rank=None,
                events=events,
                deadline=soon(90.0),
            )
            (replica,) = manager.replicas()
            assert OPENAI in replica.capabilities
            endpoint = await cast("SupportsOpenAI", replica).openai_endpoint(deadline=soon())
            assert manager.addresses() == (endpoint.base_url,)
            await replica.pause("abort", deadline=soon())
            await send(replica.receiver_host, ListSource(weights_of(words[1])), 5)
            await replica.resume(deadline=soon())
            said: dict[str, object] = {"manager": manager, "openai": openai, "deadline": soon()}
            await said_in_readme(said)
            assert said["version"] == "5"
            assert said["text"]
            endpoint = await cast("SupportsOpenAI", manager.replicas()[0]).openai_endpoint(deadline=soon())
            shown = await asked_in_shell(endpoint)
            assert "x-verl-weight-version: 5" in shown
            assert json.loads(shown.splitlines()[-1])["usage"]["completion_tokens"] == 8
            await manager.close(deadline=soon())
        finally:
            await runtime.close(deadline=soon())

    on_loop(case())


async def said_in_readme(names: dict[str, object]) -> None:
    """Run the README's example."""
    example = shown_in_readme("python", "AsyncOpenAI")
    code = compile(example, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)


async def asked_in_shell(endpoint: OpenAIEndpoint) -> str:
    """Return what the README's command prints."""
    shell = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        shown_in_readme("bash", "curl"),
        env={**os.environ, "BASE_URL": endpoint.base_url, "API_KEY": endpoint.api_key, "MODEL": endpoint.model},
        stdout=asyncio.subprocess.PIPE,
    )
    shown, _ = await shell.communicate()
    return shown.decode()


def shown_in_readme(language: str, word: str) -> str:
    """Return the one example in `language` that has `word`."""
    blocks = [part.split("```")[0] for part in README.read_text(encoding="utf-8").split(f"```{language}\n")[1:]]
    (example,) = [block for block in blocks if word in block]
    return example


def test_an_engine_without_the_option_has_no_endpoint(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            assert OPENAI not in engine.capabilities
            with pytest.raises(StateError, match="openai_server"):
                await engine.openai_endpoint(deadline=soon())

    on_loop(case())


def test_arguments_that_the_server_does_not_know_are_refused(words: tuple[Path, PreTrainedModel]) -> None:
    for arguments, message in (
        ({"api_key": "x"}, "vLLM's server has no api_key"),
        ({"lora_modules": []}, "vLLM's server has no lora_modules"),
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
    ):
        options = VLLMOptions(openai_server=True, openai_args=arguments)
        with pytest.raises(ConfigError, match=message):
            openai_server._arguments(settings_of(words[0]), options, "tiny")


def test_a_dead_engine_is_unavailable_and_closes(words: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        others = multiprocessing.active_children()
        engine = await asyncio.to_thread(
            VLLMEngine.create, settings(words[0]), replica_id="replica-0", rank=0, clock=CLOCK
        )
        try:
            await update(engine, weights_of(words[1]), 1)
            endpoint = await engine.openai_endpoint(deadline=soon())
            async with client_of(endpoint) as client:
                await ask(client, endpoint.model)
                running = asyncio.create_task(ask(client, endpoint.model, max_tokens=600))
                await in_vllm(engine)
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.kill()
                with pytest.raises(openai.InternalServerError) as caught:
                    await running
                assert caught.value.status_code == 503
                with pytest.raises(openai.InternalServerError, match="dead") as caught:
                    await ask(client, endpoint.model)
                assert caught.value.status_code == 503
                assert (await get(endpoint.base_url.replace("/v1", "/health")))[0] == 503
        finally:
            async with asyncio.timeout(60.0):
                await engine.close()
        with pytest.raises(openai.APIConnectionError):
            async with client_of(endpoint) as client:
                await ask(client, endpoint.model)

    on_loop(case())
