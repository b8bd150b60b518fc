"""Chats over HTTP with the tiny model: a tokenizer for it, OpenAI's client, and waiting for what happens inside."""

from __future__ import annotations

import asyncio
import string
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import openai
from shared import CLOCK, VOCAB, SharedEngine, serving, settings_of, soon, weights_of
from transformers import Qwen2Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_contracts.rollout import OpenAIEndpoint, RolloutSettings
    from verl_rollout.engine.vllm.engine import VLLMEngine


CHARACTERS = string.ascii_lowercase + string.digits + ": \n." + string.ascii_uppercase[:21]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}policy"
ASKED = [{"role": "user", "content": "what is 1 and 1"}]
PROMPT = "user: what is 1 and 1\npolicy"


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one character per id.

    Of a Qwen2 model, transformers reads every tokenizer as one over bytes, whatever its file says.
    """
    assert len(CHARACTERS) == VOCAB
    ids = {{" ": "Ġ", "\n": "Ċ"}.get(one, one): index for index, one in enumerate(CHARACTERS)}
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def settings(folder: Path, **changes: object) -> RolloutSettings:
    options = {"openai_server": True, "openai_args": {"response_role": "policy"}}
    return settings_of(folder, engine="shared:SharedEngine", engine_options=options, **changes)


def client_of(endpoint: OpenAIEndpoint, **changes: object) -> openai.AsyncOpenAI:
    fields: dict[str, object] = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "timeout": 60.0, **changes}
    return openai.AsyncOpenAI(max_retries=0, **fields)


@asynccontextmanager
async def served(folder: Path, model: PreTrainedModel) -> AsyncIterator[tuple[SharedEngine, openai.AsyncOpenAI, str]]:
    """Yield an engine with weights of version 1, a client with its key, and the name of the model."""
    async with serving(settings(folder), weights_of(model)) as engine:
        endpoint = await engine.openai_endpoint(deadline=soon())
        async with client_of(endpoint) as client:
            yield engine, client, endpoint.model


@asynccontextmanager
async def unsynced(folder: Path, **changes: object) -> AsyncIterator[tuple[SharedEngine, OpenAIEndpoint]]:
    """Yield an engine that holds no weights."""
    engine = await asyncio.to_thread(
        SharedEngine.create, settings(folder, **changes), replica_id="replica-0", rank=0, clock=CLOCK
    )
    try:
        yield engine, await engine.openai_endpoint(deadline=soon())
    finally:
        await engine.close()


async def ask(client: openai.AsyncOpenAI, model: str, **changes: object) -> tuple[str, dict[str, str]]:
    """Return the text and the headers of a greedy answer."""
    arguments: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, **changes}
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=ASKED,
        **arguments,
    )
    (choice,) = raw.parse().choices
    assert choice.message.role == "policy"
    return choice.message.content or "", dict(raw.headers)


async def begun(engine: VLLMEngine, tokens: int) -> None:
    async with asyncio.timeout(30.0):
        while engine.status().generated_tokens < tokens:  # noqa: ASYNC110 - a status is polled
            await asyncio.sleep(0.002)


async def in_vllm(engine: VLLMEngine, count: int = 1) -> None:
    async with asyncio.timeout(30.0):
        while engine.status().running < count:  # noqa: ASYNC110 - a status is polled
            await asyncio.sleep(0.001)


async def waiting(engine: VLLMEngine, count: int) -> None:
    async with asyncio.timeout(30.0):
        while engine.status().waiting < count:  # noqa: ASYNC110 - a status is polled
            await asyncio.sleep(0.002)
