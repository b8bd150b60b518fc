# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of an `AgentLoopManager`: n results for n samples, whatever happened to each.

Plays a loop that asks once per sample; the client and the reward come from `verl_contracts.testing.scripted_agents`.
"""

from __future__ import annotations

import abc
import asyncio
from typing import TYPE_CHECKING, ClassVar

import pytest

from verl_contracts.clock import Deadline
from verl_contracts.errors import VerlError
from verl_contracts.runtime import ObjectSpec
from verl_contracts.samples import ABSTAINED, FAILED, SCORED, TIMED_OUT, GroupRequest, GroupUid, Prompt, Trajectory
from verl_contracts.testing.scripted import default_answer
from verl_contracts.testing.scripted_agents import ABSTAINS, FAILS, FAILS_ONCE, HANGS
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.tokens import SamplingParams

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from verl_contracts.agents import AgentLoopManager
    from verl_contracts.clock import Clock
    from verl_contracts.runtime import Caller
    from verl_contracts.samples import SampleResult

__all__ = ["AgentLoopManagerSuite"]

CLIENT = ObjectSpec(path="verl_contracts.testing.scripted_agents:ScriptedClient", arguments={"version": 4})
REWARD = ObjectSpec(path="verl_contracts.testing.scripted_agents:ScriptedReward")


def _request(row: int, prompt_ids: tuple[int, ...] = (5, 6), *, n: int = 4, data_source: str = "t") -> GroupRequest:
    return GroupRequest(
        uid=GroupUid(epoch=0, row=row),
        prompt=Prompt(epoch=0, row=row, prompt_ids=prompt_ids, data_source=data_source, ground_truth="x"),
        n=n,
        sampling=SamplingParams(max_tokens=16),
    )


class AgentLoopManagerSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `created`."""

    reaction_s: ClassVar[float] = 30.0
    """Longest that one group may take here."""

    @abc.abstractmethod
    def created(
        self, clock: Clock, *, client: ObjectSpec, reward: ObjectSpec | None, sample_limit_s: float
    ) -> AbstractAsyncContextManager[tuple[AgentLoopManager, Caller]]:
        """Create a manager whose loop asks the client once per sample, and close it in the end.

        The caller is the one that gets payloads.
        """

    def _soon(self, clock: Clock) -> Deadline:
        return Deadline.after(clock, self.reaction_s)

    async def _trajectory(self, caller: Caller, sample: SampleResult, clock: Clock) -> Trajectory:
        assert sample.payload is not None
        value = await caller.get(sample.payload, deadline=self._soon(clock))
        assert isinstance(value, tuple)
        (trajectory,) = value
        assert isinstance(trajectory, Trajectory)
        return trajectory

    def test_group_comes_back_whole_and_scored(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, caller):
                result = await manager.run_group(_request(3), deadline=self._soon(clock))
                assert result.uid == GroupUid(epoch=0, row=3)
                assert len(result.samples) == 4
                answer = default_answer((5, 6))
                for sample in result.samples:
                    assert (sample.outcome, sample.score) == (SCORED, len(answer) / 10)
                    trajectory = await self._trajectory(caller, sample, clock)
                    assert trajectory.ids == (5, 6, *answer), "the engine's own ids"
                    assert trajectory.loss_mask == (0, 0, *(1 for _ in answer))
                    assert trajectory.prompt_length == 2
                    assert (sample.num_tokens, sample.num_trained) == (len(trajectory.ids), len(answer))
                    assert sample.versions == trajectory.versions() == (4, 4)
                    assert sample.failure is None

        self.run(case)

    def test_without_a_reward_nothing_is_scored(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=None, sample_limit_s=20.0) as (manager, caller):
                result = await manager.run_group(_request(1), deadline=self._soon(clock))
                assert [sample.score for sample in result.samples] == [None] * 4
                for sample in result.samples:
                    assert sample.outcome not in (SCORED, FAILED, TIMED_OUT)
                    await self._trajectory(caller, sample, clock)

        self.run(case)

    def test_reward_that_declines_is_no_score_of_zero(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, _):
                result = await manager.run_group(_request(1, data_source=ABSTAINS), deadline=self._soon(clock))
                assert {(sample.outcome, sample.score) for sample in result.samples} == {(ABSTAINED, None)}

        self.run(case)

    def test_many_groups_at_once_are_not_mixed_up(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, caller):
                requests = [_request(row, (row + 1, 2), n=2) for row in range(24)]
                results = await asyncio.gather(*(manager.run_group(r, deadline=self._soon(clock)) for r in requests))
                for request, result in zip(requests, results, strict=True):
                    assert result.uid == request.uid
                    for sample in result.samples:
                        ids = (await self._trajectory(caller, sample, clock)).ids
                        assert ids == request.prompt.prompt_ids + default_answer(request.prompt.prompt_ids)

        self.run(case)

    def test_one_failed_sample_spares_the_others(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, _):
                result = await manager.run_group(_request(1, (FAILS_ONCE, 1)), deadline=self._soon(clock))
                assert [sample.outcome for sample in result.samples] == [SCORED, FAILED, SCORED, SCORED]
                failed = result.samples[1]
                assert (failed.score, failed.payload) == (None, None)
                assert failed.failure is not None
                assert "scripted failure" in failed.failure.cause
                assert failed.failure.lines, "the traceback's last lines"

        self.run(case)

    def test_group_that_fails_altogether_is_still_a_result(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, _):
                result = await manager.run_group(_request(1, (FAILS, 1)), deadline=self._soon(clock))
                assert {(sample.outcome, sample.score) for sample in result.samples} == {(FAILED, None)}
                again = await manager.run_group(_request(2), deadline=self._soon(clock))
                assert {sample.outcome for sample in again.samples} == {SCORED}

        self.run(case)

    def test_sample_that_hangs_is_timed_out_at_its_own_limit(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=0.5) as (manager, _):
                began = clock.now()
                result = await manager.run_group(_request(1, (HANGS, 1)), deadline=self._soon(clock))
                assert clock.now() - began < 10.0
                assert [sample.outcome for sample in result.samples] == [TIMED_OUT, SCORED, SCORED, SCORED]
                assert result.samples[0].score is None
                assert result.samples[0].failure is not None

        self.run(case)

    def test_cancelled_group_leaves_the_manager_working(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, _):
                task = asyncio.create_task(manager.run_group(_request(1, (HANGS, 1)), deadline=self._soon(clock)))
                await clock.sleep(0.1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                result = await manager.run_group(_request(2), deadline=self._soon(clock))
                assert {sample.outcome for sample in result.samples} == {SCORED}

        self.run(case)

    def test_closed_manager_refuses_and_close_may_be_repeated(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, client=CLIENT, reward=REWARD, sample_limit_s=20.0) as (manager, _):
                for _ in range(2):
                    await manager.close(deadline=self._soon(clock))
                with pytest.raises(VerlError):
                    await manager.run_group(_request(1), deadline=Deadline.after(clock, 5.0))

        self.run(case)
