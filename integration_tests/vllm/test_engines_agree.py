"""Two engines, one policy: vLLM and the embedded engine choose the same tokens, before and after a trainer's update."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from shared import (
    CLOCK,
    complete,
    need_two_devices,
    on_loop,
    serving,
    settings_of,
    soon,
    tiny_model,
    update,
    weights_of,
)
from texts import compare, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_contracts.testing.tensors import ListSource
from verl_contracts.tokens import GenerationRequest, SampleKey, SamplingParams
from verl_rollout.engine.torch.engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from verl_contracts.rollout import RolloutSettings
    from verl_contracts.tokens import AbortedCompletion, Completion

SMOLLM2 = Path(os.environ.get("VERL_SMOLLM2", "models/smollm2"))
QUESTIONS = 20


def questions(folder: Path, *, max_tokens: int) -> list[GenerationRequest]:
    """Return greedy requests in words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = []
    for number in range(QUESTIONS):
        message = [{"role": "user", "content": f"What is {number} + {3 * number % 7}?"}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(str(text), add_special_tokens=False)["input_ids"]
        made.append(
            GenerationRequest(
                request_id=f"q{number}",
                prompt_ids=tuple(ids),
                sampling=SamplingParams(
                    max_tokens=max_tokens, temperature=0.0, stop_token_ids=(tokenizer.eos_token_id,)
                ),
                key=SampleKey(uid=f"0-{number}-0", sample=0, turn=0),
            )
        )
    return made


async def embedded(
    settings: RolloutSettings, weights: Mapping[str, torch.Tensor], requests: Sequence[GenerationRequest]
) -> list[Completion | AbortedCompletion]:
    """Return what the embedded engine answers."""
    engine = TorchEngine.create(settings, replica_id="embedded", rank=0, clock=CLOCK)
    try:
        await engine.pause("abort", deadline=soon())
        engine.begin_update()
        engine.target().load(ListSource(weights).tensors())
        await engine.commit(1, keep_cache=False)
        await engine.resume()
        return [await engine.generate(request, deadline=soon(120.0)) for request in requests]
    finally:
        await engine.close()


def stepped(model: PreTrainedModel, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the weights after one step of a trainer on `ids`; the model itself is changed."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
    optimizer.step()
    model.requires_grad_(False)
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there; make it: python tools/make_smollm2.py")
def test_a_language_model_is_the_same_in_both_engines_before_and_after_an_update() -> None:
    async def case() -> None:
        model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).requires_grad_(False)
        requests = questions(SMOLLM2, max_tokens=16)
        settings = settings_of(SMOLLM2, max_model_len=128, max_num_seqs=20)
        longest = 0
        async with serving(settings, weights_of(model)) as engine:
            for version in (1, 2):
                if version == 2:
                    await update(engine, stepped(model, requests[0].prompt_ids), 2)
                theirs = await complete(engine, requests)
                ours = await embedded(settings_of(SMOLLM2, max_model_len=128), weights_of(model), requests)
                compared = compare(theirs, requests, model)
                compare(ours, requests, model)
                assert compared >= 10 * QUESTIONS, "near ties are rare"
                longest = max(longest, max(len(reply.token_ids) for reply in theirs))
        assert longest > 4

    on_loop(case(), 380.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_shards_of_one_model_are_the_model(tmp_path: Path) -> None:
    async def case() -> None:
        model, other = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "two", seed=1)
        settings = settings_of(tmp_path / "one", devices_per_replica=2)
        async with serving(settings, weights_of(model)) as engine:
            requests = greedy(range(8))
            compare(await complete(engine, requests), requests, model)
            await update(engine, weights_of(other), 2)
            compare(await complete(engine, requests), requests, other)

    need_two_devices()
    on_loop(case(), 220.0)
