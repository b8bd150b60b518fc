"""What agent loops talk to, without a model: a client and a reward that can be built in any process.

The prompt tells how they behave, since a test cannot reach into another process: see the constants.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from verl_contracts.rewards import RewardResult
from verl_contracts.samples import ABSTAINED, FAILED, SCORED
from verl_contracts.testing.scripted import Script, ScriptedReplica
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from verl_contracts.clock import Deadline
    from verl_contracts.rewards import RewardClient, RewardRequest
    from verl_contracts.rollout import LLMClient
    from verl_contracts.runtime import ActorContext
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest

__all__ = ["ABSTAINS", "FAILS", "FAILS_ONCE", "HANGS", "ScriptedClient", "ScriptedReward"]

FAILS = 9001
"""First prompt id: every generation raises."""
FAILS_ONCE = 9002
"""First prompt id: the generation of sample 1 raises, the others answer."""
HANGS = 9003
"""First prompt id: the generation of sample 0 never ends by itself."""
ABSTAINS = "abstains"
"""Data source that the reward declines to judge."""


class ScriptedClient:
    """An `LLMClient` over one scripted replica of its own."""

    def __init__(self, *, context: ActorContext, seconds_per_token: float = 0.001, version: int = 1) -> None:
        self._clock = context.clock
        self._replica = ScriptedReplica(
            "scripted", clock=context.clock, capacity=1024, script=Script(seconds_per_token=seconds_per_token)
        )
        self._replica.commit(version, keep_cache=False)

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Answer, fail or hang, as the prompt says."""
        first = request.prompt_ids[0]
        if first == FAILS or (first == FAILS_ONCE and request.key.sample == 1):
            raise RuntimeError(f"scripted failure of {request.request_id}")
        if first == HANGS and request.key.sample == 0:
            await bounded(
                asyncio.Event().wait(), subject="nothing", holder="nobody", deadline=deadline, clock=self._clock
            )
        return await self._replica.generate(request, deadline=deadline)

    async def close(self) -> None:
        """Do nothing."""


class ScriptedReward:
    """A `RewardClient`: a tenth of the response's length, unless the data source abstains."""

    def __init__(self, *, context: ActorContext) -> None:
        del context

    async def score(self, request: RewardRequest, /, *, deadline: Deadline) -> RewardResult:
        """Judge by length."""
        if request.data_source == ABSTAINS:
            return RewardResult(outcome=ABSTAINED, reason="scripted")
        if not request.response_ids:
            return RewardResult(outcome=FAILED, reason="empty response")
        return RewardResult(outcome=SCORED, score=len(request.response_ids) / 10, metrics={"length": 1.0})

    async def close(self) -> None:
        """Do nothing."""


if TYPE_CHECKING:

    def _is_client(x: ScriptedClient) -> LLMClient:
        return x

    def _is_reward(x: ScriptedReward) -> RewardClient:
        return x
