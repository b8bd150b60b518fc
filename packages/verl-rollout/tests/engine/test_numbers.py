"""What is generated: the model's own tokens and log-probs, whatever shares the batch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from engine_models import VOCAB, complete, opened, raw_logprobs, request_of, settings_of, soon

from verl_rollout.engine.torch.model import build_model

if TYPE_CHECKING:
    from engine_models import Tiny

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [1, 2, 3], [14, 15], [3, 2, 1, 0], [1, 2, 3, 4, 5, 6, 7]]


async def test_greedy_equals_transformers_when_slots_are_few(tiny: Tiny) -> None:
    async with opened(settings_of(tiny.path, max_num_seqs=3), tiny.model) as engine:
        answers = await asyncio.gather(
            *(
                engine.generate(request_of(p, temperature=0.0, max_tokens=20 - i, name=str(i)), deadline=soon())
                for i, p in enumerate(PROMPTS)
            )
        )
    for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        wanted = tiny.model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20 - i,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(complete(answer).token_ids) == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_logprobs_equal_a_full_forward_when_sampled(tiny: Tiny, temperature: float) -> None:
    async with opened(settings_of(tiny.path), tiny.model) as engine:
        answers = await asyncio.gather(
            *(
                engine.generate(
                    request_of(p, temperature=temperature, max_tokens=12, name=str(i), sample=i), deadline=soon()
                )
                for i, p in enumerate(PROMPTS)
            )
        )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor(complete(answer).token_ids)
        wanted = raw_logprobs(tiny.model, prompt, ids.tolist())
        if temperature:
            wanted = torch.log_softmax(wanted / temperature, dim=-1)
        chosen = wanted.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(complete(answer).logprobs), chosen, atol=1e-5, rtol=0)


async def test_sampling_follows_the_softmax_when_drawn_often(qwen: Tiny) -> None:
    count = 4000
    async with opened(settings_of(qwen.path, max_num_seqs=64), qwen.model) as engine:
        answers = await asyncio.gather(
            *(
                engine.generate(request_of([1, 2], max_tokens=1, name=str(i), sample=i), deadline=soon())
                for i in range(count)
            )
        )
    seen = torch.bincount(torch.tensor([complete(a).token_ids[0] for a in answers]), minlength=VOCAB)
    wanted = raw_logprobs(qwen.model, [1, 2], [0])[0].exp() * count
    common = wanted >= 5
    chi2 = ((seen - wanted) ** 2 / wanted)[common].sum().item()
    assert common.sum() >= 3
    # 3 standard deviations above the mean of chi-square with that many degrees of freedom; the draw is fixed.
    freedom = int(common.sum()) - 1
    assert chi2 < freedom + 3 * (2 * freedom) ** 0.5


async def test_truncated_logprobs_are_renormalized_when_top_p_and_top_k_are_set(qwen: Tiny) -> None:
    async with opened(settings_of(qwen.path, max_num_seqs=64), qwen.model) as engine:
        for top_p, top_k in ((0.8, None), (1.0, 3), (0.5, 5)):
            answers = await asyncio.gather(
                *(
                    engine.generate(
                        request_of([7, 8], max_tokens=1, name=str(i), sample=i, top_p=top_p, top_k=top_k),
                        deadline=soon(),
                    )
                    for i in range(200)
                )
            )
            probs, order = raw_logprobs(qwen.model, [7, 8], [0])[0].exp().sort(descending=True)
            kept = probs[: top_k or VOCAB] / probs[: top_k or VOCAB].sum()
            kept = kept[(kept.cumsum(0) - kept) < top_p]
            wanted = dict(zip(order.tolist(), (kept / kept.sum()).log().tolist(), strict=False))
            got = {complete(a).token_ids[0]: complete(a).logprobs[0] for a in answers}
            assert set(got) <= set(wanted)
            assert got == pytest.approx({token: wanted[token] for token in got}, abs=1e-5)


async def test_bfloat16_stays_close_when_compared_with_float32(qwen: Tiny) -> None:
    async with opened(settings_of(qwen.path, dtype="bfloat16"), qwen.model) as engine:
        answer = complete(await engine.generate(request_of([1, 2, 3], max_tokens=10), deadline=soon()))
    wanted = raw_logprobs(qwen.model, [1, 2, 3], answer.token_ids)
    chosen = wanted.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=0.5, rtol=0)


def test_a_bfloat16_model_keeps_its_buffers_in_float32(qwen: Tiny) -> None:
    model, _ = build_model(settings_of(qwen.path, dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32
