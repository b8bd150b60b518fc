"""Data cannot be changed, is given by keyword, and open sets are types of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.samples import SCORED, SampleResult
from verl_contracts.tokens import AbortedCompletion, Completion, LogprobKind, SamplingParams

if TYPE_CHECKING:
    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import LLMClient
    from verl_contracts.tokens import GenerationRequest

params = SamplingParams(max_tokens=8, temperature=0.5)
params.temperature = 1.0  # E: misc
SamplingParams(8)  # E: call-arg
SamplingParams(max_tokens=8, top_q=0.5)  # E: call-arg

SampleResult(index=0, outcome=SCORED)
SampleResult(index=0, outcome="scored")  # E: arg-type
kind: LogprobKind = "sampled"  # E: assignment


def train_on(completion: Completion) -> int:
    return len(completion.token_ids)


async def cut_outputs_cannot_be_trained_on(client: LLMClient, request: GenerationRequest, deadline: Deadline) -> int:
    answer = await client.generate(request, deadline=deadline)
    train_on(answer)  # E: arg-type
    return 0 if isinstance(answer, AbortedCompletion) else train_on(answer)


async def waits_need_a_deadline(client: LLMClient, request: GenerationRequest) -> None:
    await client.generate(request)  # E: call-arg
