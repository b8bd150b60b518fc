"""What a vLLM replica tells of itself: prompts, and what its prefix cache saved of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from shared import complete, on_loop, serving, settings_of, soon, update, weights_of
from texts import greedy

from verl_contracts.rollout import KEEP
from verl_contracts.tokens import AbortedCompletion

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

PROMPT = tuple(range(1, 50)) * 6


def test_a_prompt_that_comes_again_is_cached_until_the_weights_change(
    tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:

            async def asked() -> tuple[int, int]:
                before = engine.status()
                (request,) = greedy([1], max_tokens=4)
                await complete(engine, [replace(request, prompt_ids=PROMPT)])
                now = engine.status()
                return (
                    now.prompt_tokens - before.prompt_tokens,
                    now.cached_prompt_tokens - before.cached_prompt_tokens,
                )

            assert await asked() == (len(PROMPT), 0)
            prompt, cached = await asked()
            assert prompt == len(PROMPT)
            assert len(PROMPT) / 2 < cached < len(PROMPT), "whole blocks, and never the last token"
            await update(engine, weights_of(other), 2)
            assert await asked() == (len(PROMPT), 0), "what older weights computed is of no use"

    on_loop(case())


def test_a_cut_request_counts_its_prompt_and_one_that_never_began_does_not(
    tiny: tuple[Path, PreTrainedModel],
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            if KEEP not in engine.capabilities:
                pytest.skip("this vLLM does not tell which tokens came after an update, so it keeps nothing over one")
            first, second = greedy([1, 2], max_tokens=400)
            running = asyncio.create_task(engine.generate(first, deadline=soon()))
            async with asyncio.timeout(30.0):
                while engine.status().generated_tokens == 0:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.002)
            assert engine.status().prompt_tokens == 0, "it has not ended"
            await engine.pause("keep", deadline=soon())
            waiting = asyncio.create_task(engine.generate(second, deadline=soon()))
            await asyncio.sleep(0)
            await engine.abort(None, reason="asked to")
            await engine.resume()
            for reply in await asyncio.gather(running, waiting):
                assert isinstance(reply, AbortedCompletion)
            assert engine.status().prompt_tokens == len(first.prompt_ids)

    on_loop(case())
