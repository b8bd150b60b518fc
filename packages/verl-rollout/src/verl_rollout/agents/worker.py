"""The process that plays groups: n samples at once, each under a limit of its own, each with an outcome of its own.

The failure that it prevents is one bad sample that costs the whole group, or the run: whatever an episode raises
becomes a failed sample with its traceback, and an episode that does not end becomes a timed-out one. Only what no
sample is to blame for, like no replica being left, fails the group.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from verl_contracts.errors import ActorFailed, NoHealthyReplica, StateError, WaitTimeout
from verl_contracts.failures import FailureRecord
from verl_contracts.plugins import build_plugin, families, load_plugin
from verl_contracts.rewards import RewardClient
from verl_contracts.rollout import LLMClient
from verl_contracts.samples import ABSTAINED, FAILED, SCORED, TIMED_OUT, GroupResult, SampleResult
from verl_contracts.waits import bounded
from verl_rollout.agents.failures import FailureLog, describe
from verl_rollout.agents.scoring import num_turns, oldest_and_newest, reward_request
from verl_rollout.objects import build_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.clock import Deadline
    from verl_contracts.runtime import ActorContext, ObjectSpec
    from verl_contracts.samples import GroupRequest, Outcome, Trajectory

__all__ = ["LOOP_OPTIONS_KEY", "AgentWorkerActor"]

_SAMPLE_LIMIT = "actor_rollout_ref.rollout.agent.sample_limit_s"

LOOP_OPTIONS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_options"
"""Config key of the loop's options, for messages."""


class AgentWorkerActor:
    """Plays groups with one agent loop, one client and one reward client."""

    def __init__(
        self,
        *,
        context: ActorContext,
        client: ObjectSpec,
        reward: ObjectSpec | None,
        loop: str,
        loop_options: Mapping[str, object],
        sample_limit_s: float,
    ) -> None:
        self._context = context
        self._sample_limit_s = sample_limit_s
        self._failures = FailureLog()
        role = f"{context.role}[{context.rank}]"
        loop_class = load_plugin(families.AGENT_LOOP, loop, key=families.AGENT_LOOP.key, role=role)
        model = build_object(client, LLMClient, context=context, name="LLM client")
        self._loop = build_plugin(loop_class, loop_options, key=LOOP_OPTIONS_KEY, arguments={"client": model})
        self._reward = (
            None if reward is None else build_object(reward, RewardClient, context=context, name="reward client")
        )

    async def run_group(self, request: GroupRequest, deadline: Deadline) -> GroupResult:
        """Play all n samples. Raises only for the infrastructure, and then stops the other samples."""
        tasks = [asyncio.create_task(self._sample(request, index, deadline)) for index in range(request.n)]
        try:
            samples = await asyncio.gather(*tasks)  # wait: each task ends at its own limit
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # wait: all were cancelled
            raise
        return GroupResult(uid=request.uid, samples=tuple(samples))

    async def close(self) -> None:
        """Stop the reward processes, and log how often samples failed."""
        self._failures.close()
        if self._reward is not None:
            await self._reward.close()

    async def _sample(self, request: GroupRequest, index: int, deadline: Deadline) -> SampleResult:
        clock = self._context.clock
        started = clock.now()
        limit = deadline.within(clock, self._sample_limit_s, setting=_SAMPLE_LIMIT)
        try:
            return await bounded(
                self._play(request, index, started, limit),
                subject=f"sample {index} of group {request.uid}",
                holder=f"{self._context.role}[{self._context.rank}]",
                deadline=limit,
                clock=clock,
            )
        except (NoHealthyReplica, ActorFailed):
            raise
        except Exception as exc:
            outcome = TIMED_OUT if isinstance(exc, WaitTimeout) else FAILED
            record = describe(exc, role=self._context.role, rank=self._context.rank)
            self._failures.note(f"sample {index} of group {request.uid}", outcome, record)
            return SampleResult(index=index, outcome=outcome, failure=record, seconds=clock.now() - started)

    async def _play(self, request: GroupRequest, index: int, started: float, limit: Deadline) -> SampleResult:
        trajectories = await self._loop.run(request, index, deadline=limit)
        if not trajectories:
            raise StateError("aborted: a turn was cut and not continued")
        outcome, score, metrics, failure = await self._judge(request, index, trajectories, limit)
        return SampleResult(
            index=index,
            outcome=outcome,
            score=score,
            payload=await self._context.caller.put(trajectories),
            num_tokens=sum(len(trajectory.ids) for trajectory in trajectories),
            num_trained=sum(trajectory.num_trained for trajectory in trajectories),
            versions=oldest_and_newest(trajectories),
            truncated=any(trajectory.truncated for trajectory in trajectories),
            num_turns=num_turns(trajectories),
            seconds=self._context.clock.now() - started,
            metrics=metrics,
            failure=failure,
        )

    async def _judge(
        self, request: GroupRequest, index: int, trajectories: tuple[Trajectory, ...], limit: Deadline
    ) -> tuple[Outcome, float | None, Mapping[str, float], FailureRecord | None]:
        if self._reward is None:
            return ABSTAINED, None, {}, None
        verdict = await self._reward.score(reward_request(request, index, trajectories), deadline=limit)
        if verdict.outcome == SCORED:
            return SCORED, verdict.score, verdict.metrics, None
        cause = RuntimeError(f"reward {verdict.outcome}: {verdict.reason}")
        record = FailureRecord.from_exception(cause, role=self._context.role, rank=self._context.rank)
        failed = verdict.outcome in (FAILED, TIMED_OUT)
        level = logging.WARNING if failed else logging.INFO
        self._failures.note(f"sample {index} of group {request.uid}", verdict.outcome, record, level=level)
        return verdict.outcome, verdict.score, verdict.metrics, record if failed else None
