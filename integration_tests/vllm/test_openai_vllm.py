"""The OpenAI protocol of a replica, asked by OpenAI's own client: the same gate and weights as for everybody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest
from chats import ASKED, CHARACTERS, PROMPT, ask, begun, client_of, served, unsynced, waiting
from shared import on_loop, send, soon, update, weights_of
from texts import CLOSE

from verl_contracts.rollout import KEEP
from verl_contracts.testing.tensors import ListSource
from verl_rollout.engine.vllm.openai_guard import LAST_VERSION_HEADER, VERSION_HEADER

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


def test_chat_and_completions_answer_alike_streamed_or_not_and_say_the_version(
    words: tuple[Path, PreTrainedModel], other: PreTrainedModel
) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            texts = []
            for version, truth in ((1, words[1]), (2, other)):
                if version > 1:
                    await update(engine, weights_of(truth), version)
                text, headers = await ask(client, model)
                assert headers[VERSION_HEADER] == str(version)
                assert LAST_VERSION_HEADER not in headers
                async with client.chat.completions.with_streaming_response.create(
                    model=model,
                    messages=ASKED,
                    max_tokens=8,
                    temperature=0.0,
                    stream=True,
                ) as streamed:
                    assert streamed.headers[VERSION_HEADER] == str(version)
                    parts = [part.choices[0].delta.content or "" async for part in await streamed.parse()]
                assert "".join(parts) == text
                assert len(parts) > 2
                plain = await client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0.0)
                assert plain.choices[0].text == text
                stream = await client.completions.create(
                    model=model, prompt=PROMPT, max_tokens=8, temperature=0.0, stream=True
                )
                assert "".join([part.choices[0].text async for part in stream]) == text
                texts.append(text)
            assert texts[0] != texts[1]
            assert engine.status().generated_tokens == 2 * 4 * 8
            models = [one.id async for one in client.models.list()]
            assert models == [model]

    on_loop(case())


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_commit_it_is_unavailable(words: tuple[Path, PreTrainedModel], stream: bool) -> None:
    async def case() -> None:
        async with unsynced(words[0]) as (_, endpoint), client_of(endpoint) as client:
            with pytest.raises(openai.InternalServerError, match="sync the weights first") as caught:
                await ask(client, endpoint.model, stream=stream)
            assert caught.value.status_code == 503
            assert VERSION_HEADER not in caught.value.response.headers

    on_loop(case())


@pytest.mark.parametrize("stream", [False, True])
def test_a_paused_engine_answers_after_the_next_update_with_the_new_weights(
    words: tuple[Path, PreTrainedModel], other: PreTrainedModel, stream: bool
) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            old, _ = await ask(client, model)
            await engine.pause("wait", deadline=soon())
            creating = client.chat.completions.with_raw_response.create(
                model=model,
                messages=ASKED,
                max_tokens=8,
                temperature=0.0,
                stream=stream,
            )
            asking = asyncio.create_task(creating)
            await waiting(engine, 1)
            await engine.pause("wait", deadline=soon())  # it does not keep a pause from taking effect
            await send(engine.receiver_host, ListSource(weights_of(other)), 2)
            assert not asking.done()
            await engine.resume()
            raw = await asking
            assert raw.headers[VERSION_HEADER] == "2"
            if stream:
                text = "".join([part.choices[0].delta.content or "" async for part in raw.parse()])
            else:
                text = raw.parse().choices[0].message.content or ""
            assert text != old
            assert (await ask(client, model))[0] == text

    on_loop(case())


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_longer_than_a_request_may_take_is_sent_away(
    words: tuple[Path, PreTrainedModel], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            monkeypatch.setattr(engine._openai._llm, "_limit_s", 0.3)
            await engine.pause("wait", deadline=soon())
            with pytest.raises(openai.InternalServerError, match=r"0\.3 s.*request_limit_s") as caught:
                await ask(client, model, stream=stream)
            assert caught.value.status_code == 503
            assert engine.status().waiting == 0
            await engine.resume()

    on_loop(case())


def test_pauses_cut_or_keep_http_requests_as_they_do_others(
    words: tuple[Path, PreTrainedModel], other: PreTrainedModel
) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            for version, mode in enumerate(("abort", "keep") if KEEP in engine.capabilities else ("abort",), start=2):
                before = engine.status().generated_tokens
                plain = asyncio.create_task(ask(client, model, max_tokens=400))
                stream = await client.chat.completions.create(
                    model=model,
                    messages=ASKED,
                    max_tokens=400,
                    temperature=0.0,
                    stream=True,
                )
                await begun(engine, before + 20)
                assert engine.status().running == 2
                await update(engine, weights_of(other), version, mode=mode)
                last = [part async for part in stream][-1]
                text, headers = await plain
                assert headers[VERSION_HEADER] == str(version - 1)
                if mode == "abort":
                    assert last.choices[0].finish_reason == "abort"
                    assert len(text) < 400
                    assert LAST_VERSION_HEADER not in headers
                else:
                    assert last.choices[0].finish_reason == "length"
                    assert len(text) == 400
                    assert headers[LAST_VERSION_HEADER] == str(version)

    on_loop(case())


def test_no_cached_prefix_is_shared_by_requests_of_two_versions(
    words: tuple[Path, PreTrainedModel], other: PreTrainedModel
) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            if KEEP not in engine.capabilities:
                pytest.skip("this vLLM cannot keep a cache over an update")
            prompt = "".join(CHARACTERS[number % 61] for number in range(300))  # more than a block of the cache

            async def tail() -> list[float]:
                reply = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=8, temperature=0.0, logprobs=1
                )
                found = reply.choices[0].logprobs
                assert found is not None
                return [logprob for logprob in found.token_logprobs or () if logprob is not None]

            first = await tail()
            assert await tail() == pytest.approx(first, abs=CLOSE)
            await update(engine, weights_of(other), 2, mode="keep")
            kept = await tail()
            await update(engine, weights_of(other), 3)  # computes all again
            assert await tail() == pytest.approx(kept, abs=CLOSE)
            assert len(first) == len(kept) == 8
            assert first != pytest.approx(kept, abs=CLOSE)

    on_loop(case())


def test_a_request_whose_client_leaves_is_forgotten(words: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            await engine.pause("wait", deadline=soon())
            asking = asyncio.create_task(ask(client, model))
            await waiting(engine, 1)
            asking.cancel()
            async with asyncio.timeout(30.0):
                while engine._flying:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.002)
            await engine.resume()
            await ask(client, model)

    on_loop(case())


def test_a_seed_is_refused_where_it_would_kill_the_engine(words: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with served(*words) as (engine, client, model):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="without `seed`"):
                    await ask(client, model, seed=7, stream=stream)
            assert not engine._flying
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await ask(client, "another")
            with pytest.raises(openai.BadRequestError):
                await ask(client, model, max_tokens=-1)

    on_loop(case())
