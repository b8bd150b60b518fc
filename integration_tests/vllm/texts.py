"""Greedy requests, and comparing what came back with a plain pass of transformers.

Two computations of one model differ in the last bits, so the greedy choice may differ where the two likeliest tokens
are all but equal: up to the first such place ids must be equal, and log-probs close.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from shared import VOCAB

from verl_contracts.tokens import GenerationRequest, SampleKey, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from verl_contracts.tokens import AbortedCompletion, Completion

NEAR_TIE = 1e-3
CLOSE = 1e-4


def greedy(numbers: Iterable[int], *, max_tokens: int = 24, stop: tuple[int, ...] = ()) -> list[GenerationRequest]:
    """Return one greedy request per number, with prompts of different lengths."""
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_ids=tuple((7 * number + 3 * i + i * i) % VOCAB for i in range(3 + number % 5)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop),
            key=SampleKey(uid=f"0-{number}-0", sample=0, turn=0),
        )
        for number in numbers
    ]


def compare(
    replies: Sequence[Completion | AbortedCompletion],
    requests: Sequence[GenerationRequest],
    model: PreTrainedModel,
    *,
    close: float = CLOSE,
) -> int:
    """Compare each reply with a pass of `model` over it; return how many tokens were compared."""
    compared = 0
    for reply, request in zip(replies, requests, strict=True):
        prompt, ids = list(request.prompt_ids), list(reply.token_ids)
        assert ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        two = torch.topk(logits, 2, dim=-1).values
        for index, token in enumerate(ids):
            if float(two[index, 0] - two[index, 1]) < NEAR_TIE:
                break
            assert int(logits[index].argmax()) == token, (request.request_id, index, ids)
            assert abs(float(logprobs[index, token]) - reply.logprobs[index]) < close, (request.request_id, index)
            compared += 1
    assert compared
    return compared
