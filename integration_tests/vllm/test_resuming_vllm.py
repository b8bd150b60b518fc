"""Cut anywhere and continued, a greedy answer is the answer: two hundred times, at random tokens."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from shared import complete, on_loop, serving, settings_of, soon, weights_of
from texts import compare, greedy

from verl_contracts.tokens import AbortedCompletion, Completion

if TYPE_CHECKING:
    from pathlib import Path

    from shared import SharedEngine
    from transformers import PreTrainedModel

    from verl_contracts.tokens import GenerationRequest

ROUNDS = 200
LENGTH = 300


async def cut_and_continued(engine: SharedEngine, request: GenerationRequest, draw: random.Random) -> Completion:
    """Return the whole answer, cut at random and asked for again until it is complete."""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    for attempt in range(50):
        left = replace(
            request,
            request_id=f"{request.request_id}-{attempt}",
            prompt_ids=request.prompt_ids + ids,
            sampling=replace(request.sampling, max_tokens=LENGTH - len(ids)),
            resumed_tokens=len(ids),
        )
        running = asyncio.create_task(engine.generate(left, deadline=soon()))
        if attempt < 3:
            target = engine.status().generated_tokens + draw.randrange(1, 40)
            while not running.done() and engine.status().generated_tokens < target:  # noqa: ASYNC110 - it is polled
                await asyncio.sleep(draw.random() * 0.004)
            if draw.random() < 0.5:
                await engine.abort([left.request_id], reason="test")
            else:
                await engine.pause("abort", deadline=soon())
                await engine.resume()
        reply = await running
        ids, logprobs = ids + reply.token_ids, logprobs + reply.logprobs
        if isinstance(reply, Completion):
            return replace(reply, token_ids=ids, logprobs=logprobs)
        assert isinstance(reply, AbortedCompletion)
        if len(ids) == LENGTH:
            return Completion(
                request_id=request.request_id,
                token_ids=ids,
                logprobs=logprobs,
                spans=(),
                finish_reason="length",
                logprob_kind=reply.logprob_kind,
                replica=reply.replica,
            )
    raise AssertionError("it was never completed")


@pytest.mark.timeout(600)
def test_an_answer_that_was_cut_and_continued_is_the_uninterrupted_one(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        folder, model = tiny
        draw = random.Random(0)
        async with serving(settings_of(folder), weights_of(model)) as engine:
            requests = greedy(range(ROUNDS), max_tokens=LENGTH)
            whole = [await complete(engine, requests[first : first + 8]) for first in range(0, ROUNDS, 8)]
            uninterrupted = [reply for batch in whole for reply in batch]
            equal = 0
            for request, reference in zip(requests, uninterrupted, strict=True):
                reply = await cut_and_continued(engine, request, draw)
                assert len(reply.token_ids) == len(reply.logprobs) == LENGTH
                equal += reply.token_ids == reference.token_ids
                if reply.token_ids != reference.token_ids:
                    compare([reply], [request], model)  # it may part from it where two tokens are as likely
            assert equal >= 0.9 * ROUNDS
            status = engine.status()
            assert (status.running, status.waiting) == (0, 0)

    on_loop(case(), 580.0)
