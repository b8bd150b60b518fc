"""Deterministic mode: the same bits in every slot, beside any neighbours, in any order of arrival."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engine_models import request_of
from test_decoder import Bench, bench

if TYPE_CHECKING:
    from engine_models import Tiny

    from verl_contracts.tokens import Completion, GenerationRequest


def _requests(draw: random.Random, count: int) -> list[GenerationRequest]:
    prompts = [
        tuple(draw.randrange(31) for _ in range(draw.choice([1, 2, 7, 8, 9, 33, 40]))) for _ in range(count // 2)
    ]
    return [
        request_of(
            draw.choice(prompts),
            max_tokens=draw.randint(1, 20),
            temperature=draw.choice([0.0, 0.7, 1.0, 1.0]),
            top_p=draw.choice([1.0, 1.0, 0.9]),
            name=str(i),
            uid=f"0-{i}-0",
        )
        for i in range(count)
    ]


def _in_waves(one: Bench, requests: list[GenerationRequest], draw: random.Random) -> dict[str, Completion]:
    """Submit a few at a time, at random iterations."""
    done: dict[str, Completion] = {}
    left = list(requests)
    while left:
        for _ in range(draw.randint(1, 4)):
            if left:
                one.submit(left.pop())
        for result in one.steps(draw.randint(0, 3)):
            assert not isinstance(result.value, Exception)
            done[result.job.request.request_id] = result.value  # type: ignore[assignment]
    return done | one.finish()


@pytest.mark.parametrize("width", [1, 6, 16])
def test_bits_are_equal_when_slots_neighbours_and_arrival_differ(tiny: Tiny, width: int) -> None:
    draw = random.Random(width)
    requests = _requests(draw, 10)
    with bench(tiny, deterministic=True, max_num_seqs=width, max_model_len=128) as one:
        alone: dict[str, Completion] = {}
        for request in requests:
            one.submit(request)
            alone |= one.finish()
        for _ in range(2):
            draw.shuffle(requests)
            assert _in_waves(one, requests, draw) == alone


def test_bits_are_equal_when_cache_is_recomputed_under_the_same_weights(tiny: Tiny) -> None:
    draw = random.Random(0)
    requests = _requests(draw, 10)
    with bench(tiny, deterministic=True, max_model_len=128) as one:
        one.submit(*requests)
        wanted = one.finish()
        one.submit(*requests)
        got: dict[str, Completion] = {}
        for version in range(2, 9):
            for result in one.steps(3):
                got[result.job.request.request_id] = result.value  # type: ignore[assignment]
            one.load(tiny.model, version, keep_cache=False)
        got |= one.finish()
    assert {k: (v.token_ids, v.logprobs) for k, v in got.items()} == {
        k: (v.token_ids, v.logprobs) for k, v in wanted.items()
    }


def test_tokens_are_other_when_seed_sample_or_turn_differ(qwen: Tiny) -> None:
    seen: set[tuple[int, ...]] = set()
    for seed in (0, 1):
        with bench(qwen, deterministic=True, seed=seed) as one:
            one.submit(*(request_of((1, 2), max_tokens=20, name=str(i), sample=i) for i in range(3)))
            seen |= {done.token_ids for done in one.finish().values()}
    assert len(seen) == 6
