"""Agent loops and reward clients for tests, found by class path as those of a user are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from service_fakes import STOP

from verl_contracts.clock import Deadline
from verl_contracts.errors import StateError
from verl_contracts.rewards import RewardRequest, RewardResult
from verl_contracts.samples import ABSTAINED, FAILED, SCORED, TIMED_OUT, GroupRequest, Outcome, Trajectory
from verl_rollout.agents.single_turn import SingleTurnLoop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.agents import AgentLoop
    from verl_contracts.rewards import RewardClient
    from verl_contracts.rollout import LLMClient
    from verl_contracts.runtime import ActorContext


class MoodyLoop:
    """Plays single turns, but `moods` says what some samples do instead."""

    def __init__(self, *, client: LLMClient, moods: Mapping[int, str]) -> None:
        self._inner = SingleTurnLoop(client=client)
        self._moods = moods

    async def run(self, request: GroupRequest, sample: int, /, *, deadline: Deadline) -> tuple[Trajectory, ...]:
        mood = self._moods.get(sample)
        if mood == "raises":
            raise KeyError("scripted: no such tool")
        if mood == "aborted":
            return ()
        if mood == "times out by itself":
            raise TimeoutError("scripted: a tool took too long")
        played = await self._inner.run(request, sample, deadline=deadline)
        if mood == "restarts":
            masked = replace(played[0], loss_mask=(0,) * len(played[0].ids))
            return (masked, *played)
        if mood == "two turns":
            (first,) = played
            ids = (*first.ids, 50, 51, *first.ids[first.prompt_length :])
            mask = (*first.loss_mask, 0, 0, *first.loss_mask[first.prompt_length :])
            logprobs = (*first.logprobs, 0.0, 0.0, *first.logprobs[first.prompt_length :])
            spans = (*first.spans, *(span.shifted(len(first.ids) + 2 - first.prompt_length) for span in first.spans))
            return (replace(first, ids=ids, loss_mask=mask, logprobs=logprobs, spans=spans),)
        return played


class CountingReward:
    """Scores the share of tokens before the stop id; `moods` says what some samples get instead."""

    def __init__(self, *, context: ActorContext, moods: Mapping[int, str] | None = None) -> None:
        self._clock = context.clock
        self._moods = moods or {}
        self.closed = 0
        self.requests: list[RewardRequest] = []

    async def score(self, request: RewardRequest, /, *, deadline: Deadline) -> RewardResult:
        if self.closed:
            raise StateError("closed")
        self.requests.append(request)
        mood = self._moods.get(request.sample)
        if mood == "hangs":
            await self._clock.sleep(1e9)
        outcomes: dict[str | None, Outcome] = {"abstains": ABSTAINED, "fails": FAILED, "times out": TIMED_OUT}
        if mood in outcomes:
            return RewardResult(outcome=outcomes[mood], reason=f"scripted: {mood}")
        words = [token for token in request.response_ids if token != STOP]
        return RewardResult(outcome=SCORED, score=len(words) / 10, metrics={"words": float(len(words))})

    async def close(self) -> None:
        self.closed += 1


if TYPE_CHECKING:

    def _is_loop(x: MoodyLoop) -> AgentLoop:
        return x

    def _is_reward(x: CountingReward) -> RewardClient:
        return x
