"""The simplest episode: one prompt, one answer."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from verl_contracts.samples import Trajectory
from verl_contracts.tokens import AbortedCompletion, GenerationRequest, SampleKey

if TYPE_CHECKING:
    from verl_contracts.agents import AgentLoop
    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import LLMClient
    from verl_contracts.samples import GroupRequest

__all__ = ["SingleTurnLoop"]


class SingleTurnLoop:
    """Asks once and trains on every token of the answer."""

    def __init__(self, *, client: LLMClient) -> None:
        self._client = client
        # A group that is retried elsewhere must not meet its own earlier request, so ids are unique in the cluster.
        self._ids = (f"{os.urandom(6).hex()}-{number}" for number in itertools.count())

    async def run(self, request: GroupRequest, sample: int, /, *, deadline: Deadline) -> tuple[Trajectory, ...]:
        """Play one sample. Returns none when the answer came back aborted."""
        uid = str(request.uid)
        prompt_ids = request.prompt.prompt_ids
        reply = await self._client.generate(
            GenerationRequest(
                request_id=f"{uid}/{sample}/{next(self._ids)}",
                prompt_ids=prompt_ids,
                sampling=request.sampling,
                key=SampleKey(uid=uid, sample=sample, turn=0),
                min_version=request.min_version,
            ),
            deadline=deadline,
        )
        if isinstance(reply, AbortedCompletion):
            return ()
        start = len(prompt_ids)
        return (
            Trajectory(
                ids=prompt_ids + reply.token_ids,
                loss_mask=(0,) * start + (1,) * len(reply.token_ids),
                logprobs=(0.0,) * start + reply.logprobs,
                spans=tuple(span.shifted(start) for span in reply.spans),
                logprob_kind=reply.logprob_kind,
                prompt_length=start,
                truncated=reply.finish_reason == "length",
            ),
        )


if TYPE_CHECKING:

    def _is_loop(x: SingleTurnLoop) -> AgentLoop:
        return x
