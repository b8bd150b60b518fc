"""Weights that arrive in vLLM's workers: the same tokens as elsewhere, and nothing half done after a failure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from shared import CLOCK, complete, on_loop, send, serving, settings_of, soon, update, weights_of
from texts import compare, greedy

from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.rollout import INVALID, KEEP, PAUSED, SERVING
from verl_contracts.testing.tensors import ListSource
from verl_contracts.tokens import AbortedCompletion, Completion

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


def test_tokens_are_those_of_the_weights_that_were_sent(
    tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            requests = greedy(range(12))
            for version, truth in ((1, model), (2, other), (3, model)):
                if version > 1:
                    await update(engine, weights_of(truth), version)
                assert engine.status().version == version
                replies = await complete(engine, requests)
                assert {span.version for reply in replies for span in reply.spans} == {version}
                compare(replies, requests, truth)

    on_loop(case())


def test_an_update_that_breaks_off_leaves_an_invalid_engine_until_the_next_one(
    tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            host = engine.receiver_host
            for stop_after in (1, 5, 9):  # within and between vLLM's layers, whose tensors it collects
                await engine.pause("abort", deadline=soon())
                with pytest.raises(WeightSyncError):
                    await send(host, ListSource(weights_of(other), stop_after=stop_after), 2)
                assert engine.status().state == INVALID
                with pytest.raises(StateError, match=r"not loaded|no update"):
                    await host.commit(2, keep_cache=False, deadline=soon())
                await engine.resume()
                with pytest.raises(StateError, match="sync the weights first"):
                    await engine.generate(greedy([1])[0], deadline=soon())
                await update(engine, weights_of(other), 3)
                assert engine.status().state == SERVING
                requests = greedy(range(4))
                compare(await complete(engine, requests), requests, other)

    on_loop(case())


def test_a_transfer_is_refused_when_the_engine_is_not_paused(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            with pytest.raises(StateError, match="pause and wake it"):
                await send(engine.receiver_host, ListSource(weights_of(model)), 2)
            assert engine.status().state == SERVING

    on_loop(case())


def test_tensors_that_do_not_fit_are_refused_before_anything_is_touched(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            wrong = weights_of(model)
            wrong["head.bias"] = wrong.pop("model.norm.weight")
            await engine.pause("abort", deadline=soon())
            with pytest.raises(WeightSyncError, match=r"the model has no head.bias, model.norm.weight is not sent"):
                await engine.receiver_host.prepare(ListSource(wrong).manifest(2), session="wrong", deadline=soon())
            assert engine.status().state == PAUSED
            await engine.resume()
            requests = greedy(range(2))
            compare(await complete(engine, requests), requests, model)

    on_loop(case())


def test_an_abort_reaches_workers_that_are_loading(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            await engine.pause("abort", deadline=soon())
            host = engine.receiver_host
            stuck = asyncio.Event()
            loop = asyncio.get_running_loop()
            release = asyncio.Event()

            def before(index: int) -> None:
                if index == 3:
                    loop.call_soon_threadsafe(stuck.set)
                    asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30.0)

            sending = asyncio.create_task(send(host, ListSource(weights_of(model), before=before), 2))
            await asyncio.wait_for(stuck.wait(), 30.0)
            begun = CLOCK.now()
            await host.abort("the test wants it", deadline=soon())
            release.set()
            with pytest.raises(WeightSyncError, match="the test wants it"):
                await sending
            assert CLOCK.now() - begun < 10.0
            await engine.resume()
            await update(engine, weights_of(model), 3)
            requests = greedy(range(2))
            compare(await complete(engine, requests), requests, model)

    on_loop(case())


def test_keep_goes_on_under_new_weights_and_says_so(tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder, max_num_seqs=32), weights_of(model)) as engine:
            if KEEP not in engine.capabilities:
                pytest.skip("this vLLM does not tell which tokens came after an update, so it keeps nothing over one")
            requests = greedy(range(32), max_tokens=400)
            running = [asyncio.create_task(engine.generate(request, deadline=soon())) for request in requests]
            async with asyncio.timeout(30.0):
                while engine.status().generated_tokens < 32 * 16:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.005)
            await engine.pause("keep", deadline=soon())
            before = engine.status().generated_tokens
            await send(engine.receiver_host, ListSource(weights_of(other)), 2, keep_cache=True)
            assert engine.status().generated_tokens == before, "no token is sampled while weights are loaded"
            await engine.resume()
            replies = await asyncio.gather(*running)
            for reply in replies:
                assert isinstance(reply, Completion)
                assert len(reply.token_ids) == 400
                assert [span.start for span in reply.spans[1:]] == [span.end for span in reply.spans[:-1]]
                assert (reply.spans[0].start, reply.spans[-1].end) == (0, 400)
            both = [reply for reply in replies if len(reply.spans) == 2]
            assert len(both) == 32, "all were under way"
            assert {(s.version, s.kv_version) for r in both for s in r.spans} == {(1, 1), (2, 1)}
            fresh = await engine.generate(requests[0], deadline=soon())
            assert [(s.version, s.kv_version) for s in fresh.spans] == [(2, 2)], "it shares no prefix with the past"
            compare([fresh], requests[:1], other)

    on_loop(case())


def test_what_was_kept_and_computed_again_is_pure(tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            if KEEP not in engine.capabilities:
                pytest.skip("this vLLM does not tell which tokens came after an update, so it keeps nothing over one")
            (request,) = greedy([5], max_tokens=400)
            running = asyncio.create_task(engine.generate(request, deadline=soon()))
            async with asyncio.timeout(30.0):
                while engine.status().generated_tokens < 17:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.002)
            await engine.pause("keep", deadline=soon())
            await send(engine.receiver_host, ListSource(weights_of(other)), 2, keep_cache=False)
            await engine.resume()
            reply = await running
            assert [(s.version, s.kv_version) for s in reply.spans] == [(1, 1), (2, 2)]
            first = reply.spans[0].end
            longer = replace(request, prompt_ids=request.prompt_ids + reply.token_ids[:first])
            after = replace(reply, token_ids=reply.token_ids[first:], logprobs=reply.logprobs[first:])
            compare([after], [longer], other)

    on_loop(case())


def test_a_cut_answer_says_what_it_had(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            (request,) = greedy([7], max_tokens=400)
            running = asyncio.create_task(engine.generate(request, deadline=soon()))
            async with asyncio.timeout(30.0):
                while engine.status().generated_tokens < 17:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.002)
            await engine.abort([request.request_id], reason="asked to")
            reply = await running
            assert isinstance(reply, AbortedCompletion)
            assert reply.reason == "asked to"
            assert len(reply.token_ids) == len(reply.logprobs) >= 16
            compare([reply], [request], model)

    on_loop(case())
