from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import agent_fakes
import pytest
from agent_fakes import CountingReward
from service_fakes import STOP, World, group, settings, world

from verl_contracts.agents import AgentSettings
from verl_contracts.errors import ActorFailed, ConfigError, NoHealthyReplica, PluginError
from verl_contracts.plugins import families, load_plugin
from verl_contracts.runtime import ActorRef, ObjectSpec
from verl_contracts.samples import ABSTAINED, FAILED, SCORED, TIMED_OUT, Trajectory
from verl_contracts.testing.virtual import run_virtual
from verl_rollout.agents.manager import WorkerAgentLoopManager
from verl_rollout.agents.single_turn import SingleTurnLoop
from verl_rollout.agents.worker import AgentWorkerActor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from verl_contracts.rollout import RolloutSettings
    from verl_contracts.samples import GroupResult, SampleResult

_LOOPS = Path(agent_fakes.__file__)
_LINE = 1 + next(i for i, text in enumerate(_LOOPS.read_text().splitlines()) if "raise KeyError" in text)
RAISES = f"{_LOOPS}:{_LINE} in run"
"""Where a loop raises that is told to."""


def play(case: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world() as here:
            await case(here)

    run_virtual(main())


async def agents(
    here: World,
    rollout: RolloutSettings | None = None,
    *,
    moods: Mapping[int, str] | None = None,
    verdicts: Mapping[int, str] | None = None,
    reward: bool = True,
    num_workers: int = 1,
    sample_limit_s: float = 30.0,
    options: Mapping[str, object] | None = None,
) -> WorkerAgentLoopManager:
    manager = await here.serving(rollout if rollout is not None else settings())
    scorer = ObjectSpec(path="agent_fakes:CountingReward", arguments={"moods": dict(verdicts or {})})
    return await WorkerAgentLoopManager.create(
        AgentSettings(
            num_workers=num_workers,
            loop="single_turn" if moods is None else "agent_fakes.MoodyLoop",
            loop_options={} if moods is None else {"moods": dict(moods)},
            sample_limit_s=sample_limit_s,
            options=options or {},
        ),
        runtime=here.runtime,
        client=manager.client_spec(),
        reward=scorer if reward else None,
        events=here.events,
        deadline=here.within(60.0),
    )


def workers(here: World) -> list[AgentWorkerActor]:
    return [held.target for held in here.runtime._actors.values() if isinstance(held.target, AgentWorkerActor)]


def kill(here: World, manager: WorkerAgentLoopManager, rank: int) -> None:
    worker = manager._slots[rank].worker
    assert worker is not None
    here.runtime.fail(worker, "killed by signal 9")


async def trajectories(here: World, sample: SampleResult) -> tuple[Trajectory, ...]:
    assert sample.payload is not None
    value = await here.runtime.get(sample.payload, deadline=here.within(5.0))
    assert isinstance(value, tuple)
    return value


def outcomes(result: GroupResult) -> list[str]:
    return [sample.outcome for sample in result.samples]


def test_defaults_are_found_by_name_and_meet_their_contracts() -> None:
    assert load_plugin(families.AGENT_LOOP_MANAGER, "default", key="k") is WorkerAgentLoopManager
    assert load_plugin(families.AGENT_LOOP, "single_turn", key="k") is SingleTurnLoop


def test_group_comes_back_scored_and_described() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings({"*": {"token_s": 0.5}}))
        result = await manager.run_group(group(n=3), deadline=here.within(60.0))
        assert result.uid == group().uid
        for index, sample in enumerate(result.samples):
            assert (sample.index, sample.outcome, sample.score) == (index, SCORED, 0.5)
            assert (sample.num_tokens, sample.num_trained, sample.num_turns) == (9, 6, 1)
            assert (sample.versions, sample.truncated, sample.failure) == ((0, 0), False, None)
            assert sample.metrics == {"words": 5.0}
            assert sample.seconds == pytest.approx(3.0)
            (played,) = await trajectories(here, sample)
            assert played.ids == (1, 2, 3, 100, 101, 102, 103, 104, STOP)
            assert played.loss_mask == (0, 0, 0, 1, 1, 1, 1, 1, 1)
            assert played.logprobs[:3] == (0.0, 0.0, 0.0)
            assert [(span.start, span.end) for span in played.spans] == [(3, 9)]

    play(case)


def test_answer_that_fills_the_budget_is_truncated() -> None:
    async def case(here: World) -> None:
        manager = await agents(here)
        result = await manager.run_group(group(n=1, max_tokens=4), deadline=here.within(60.0))
        (sample,) = result.samples
        assert (sample.truncated, sample.num_trained, sample.score) == (True, 4, 0.4)

    play(case)


def test_one_sample_that_raises_leaves_the_others_unharmed() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings(max_num_seqs=64), moods={7: "raises"})
        result = await manager.run_group(group(n=100), deadline=here.within(60.0))
        assert outcomes(result).count(SCORED) == 99
        bad = result.samples[7]
        assert (bad.outcome, bad.score, bad.payload) == (FAILED, None, None)
        assert bad.failure is not None
        assert bad.failure.cause == f"KeyError: 'scripted: no such tool' ({RAISES})"
        assert "worker.py" not in "\n".join(bad.failure.lines), "only frames of the loop are shown"
        assert any("in run" in line for line in bad.failure.lines), "the traceback names where it was raised"
        assert (bad.failure.role, bad.failure.rank) == ("agent", 0)

    play(case)


def test_a_cause_is_logged_with_its_traceback_once_and_counted_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "verl_rollout.agents")

    async def case(here: World) -> None:
        manager = await agents(here, settings(max_num_seqs=64), moods=dict.fromkeys(range(40), "raises"))
        await manager.run_group(group(n=50), deadline=here.within(60.0))
        await manager.close(deadline=here.within(5.0))

    play(case)
    rows = [row for row in caplog.records if row.name == "verl_rollout.agents.failures"]
    (full,) = (row.getMessage() for row in rows if row.levelno == logging.WARNING)
    assert full.startswith("sample 0 of group ")
    assert "Traceback" in full
    assert "raise KeyError" in full
    assert sum(row.levelno == logging.DEBUG for row in rows) == 39
    assert rows[-1].getMessage().startswith("40 samples ended alike: KeyError: 'scripted: no such tool' (")


def test_a_reward_that_fails_alike_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings(max_num_seqs=64), verdicts=dict.fromkeys(range(30), "fails"))
        await manager.run_group(group(n=30), deadline=here.within(60.0))

    play(case)
    said = [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]
    assert [text.count("scripted: fails") for text in said] == [1]


def test_sample_that_never_returns_times_out_at_its_own_limit() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, verdicts={1: "hangs"}, sample_limit_s=20.0)
        result = await manager.run_group(group(n=3), deadline=here.within(600.0))
        assert outcomes(result) == [SCORED, TIMED_OUT, SCORED]
        late = result.samples[1]
        assert late.failure is not None
        assert "20 s" in late.failure.cause
        assert ".py:" not in late.failure.cause, "a wait says who was waited for; where is our business"
        assert late.seconds == pytest.approx(20.0, abs=0.1)
        assert here.clock.now() == pytest.approx(20.0, abs=0.1)

    play(case)


def test_timeout_inside_an_agent_loop_is_a_failure_not_a_lost_sample() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, moods={0: "times out by itself"})
        result = await manager.run_group(group(n=1), deadline=here.within(60.0))
        assert outcomes(result) == [FAILED]

    play(case)


def test_aborted_sample_fails_and_trains_nothing() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings({"*": {"abort_after": [5]}}, num_replicas=1, resumable=False))
        result = await manager.run_group(group(n=2), deadline=here.within(60.0))
        assert outcomes(result) == [FAILED, SCORED]
        cut = result.samples[0]
        assert (cut.payload, cut.num_trained, cut.versions) == (None, 0, None)
        assert cut.failure is not None
        assert "aborted" in cut.failure.cause

    play(case)


@pytest.mark.parametrize(
    ("mood", "outcome", "has_failure"),
    [("abstains", ABSTAINED, False), ("fails", FAILED, True), ("times out", TIMED_OUT, True)],
)
def test_sample_without_a_verdict_has_no_score(mood: str, outcome: str, has_failure: bool) -> None:
    async def case(here: World) -> None:
        manager = await agents(here, verdicts={1: mood})
        result = await manager.run_group(group(n=2), deadline=here.within(60.0))
        assert outcomes(result) == [SCORED, outcome]
        sample = result.samples[1]
        assert (sample.score, sample.failure is not None) == (None, has_failure)
        assert sample.failure is None or mood in sample.failure.cause
        assert result.scored == result.samples[:1]

    play(case)


def test_group_is_unscored_when_there_is_no_reward() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, reward=False)
        result = await manager.run_group(group(n=2), deadline=here.within(60.0))
        assert outcomes(result) == [ABSTAINED, ABSTAINED]
        assert result.scored == ()
        assert all(sample.payload is not None for sample in result.samples)

    play(case)


def test_restarted_context_comes_back_as_several_trajectories() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, moods={0: "restarts", 1: "two turns"})
        result = await manager.run_group(group(n=2), deadline=here.within(60.0))
        restarted, turns = result.samples
        assert len(await trajectories(here, restarted)) == 2
        assert (restarted.num_tokens, restarted.num_trained, restarted.num_turns) == (18, 6, 1)
        assert (turns.num_tokens, turns.num_trained, turns.num_turns) == (17, 12, 2)
        reward = workers(here)[0]._reward
        assert isinstance(reward, CountingReward)
        asked = {each.sample: each.response_ids for each in reward.requests}
        assert asked[1] == (100, 101, 102, 103, 104, STOP) * 2, "tokens of tools are not part of the response"

    play(case)


def test_no_replica_left_is_an_error_of_the_group() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings({"*": {"dies_at": 1}}))
        with pytest.raises(NoHealthyReplica, match="scripted crash"):
            await manager.run_group(group(n=4), deadline=here.within(60.0))

    play(case)


def test_cancelled_group_stops_at_the_engine() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings({"*": {"hangs": True}}, num_replicas=1))
        task = asyncio.ensure_future(manager.run_group(group(n=4), deadline=here.within(600.0)))
        await here.clock.sleep(1.0)
        assert here.engine("rollout-0").status().running == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await here.clock.sleep(1.0)
        assert here.engine("rollout-0").status().running == 0

    play(case)


def test_groups_are_spread_over_workers() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, num_workers=2)
        results = [manager.run_group(group(row, n=1), deadline=here.within(60.0)) for row in range(6)]
        tasks = [asyncio.ensure_future(result) for result in results]
        await here.clock.sleep(0.001)
        assert [slot.outstanding for slot in manager._slots] == [3, 3]
        await asyncio.gather(*tasks)
        assert [slot.outstanding for slot in manager._slots] == [0, 0]

    play(case)


def test_groups_of_a_worker_that_dies_are_played_elsewhere_and_it_starts_again() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings({"*": {"token_s": 1.0}}), num_workers=2)
        tasks = [
            asyncio.ensure_future(manager.run_group(group(row, n=2), deadline=here.within(60.0))) for row in range(4)
        ]
        await here.clock.sleep(2.0)
        kill(here, manager, 0)
        results = await asyncio.gather(*tasks)
        assert [outcomes(result) for result in results] == [[SCORED, SCORED]] * 4
        assert len(here.events.named("agent.worker_died")) == 1
        assert all(slot.worker is not None for slot in manager._slots)

    play(case)


def test_only_worker_that_dies_is_started_again_once() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, settings({"*": {"token_s": 1.0}}))

        async def killed_once() -> GroupResult:
            task = asyncio.ensure_future(manager.run_group(group(n=1), deadline=here.within(60.0)))
            await here.clock.sleep(2.0)
            kill(here, manager, 0)
            return await task

        assert outcomes(await killed_once()) == [SCORED]
        with pytest.raises(ActorFailed, match="killed by signal 9"):
            await killed_once()
        with pytest.raises(ActorFailed, match="killed by signal 9"):
            await manager.run_group(group(n=1), deadline=here.within(60.0))

    play(case)


def test_death_of_the_balancer_is_not_taken_for_one_of_the_worker() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, num_workers=2)
        (name,) = [name for name in here.runtime._actors if "rollout-balancer" in name]
        here.runtime.fail(ActorRef(name=name, role="rollout-balancer", rank=0), "killed by signal 11")
        with pytest.raises(ActorFailed, match=r"rollout-balancer\[0\].*signal 11"):
            await manager.run_group(group(n=2), deadline=here.within(60.0))
        assert here.events.named("agent.worker_died") == []

    play(case)


def test_unknown_loop_or_option_is_refused_before_anything_starts() -> None:
    async def case(here: World) -> None:
        for settings_, error, message in (
            (AgentSettings(loop="single_trun"), PluginError, "default_agent_loop: .*nearest: 'single_turn'"),
            (AgentSettings(loop="agent_fakes:CountingReward"), PluginError, "run: missing"),
            (AgentSettings(options={"restart": 2}), ConfigError, "restart: unknown option; nearest: 'restarts'"),
            (AgentSettings(num_workers=0), ConfigError, "num_workers must be at least 1, got 0"),
        ):
            with pytest.raises(error, match=message):
                await WorkerAgentLoopManager.create(
                    settings_,
                    runtime=here.runtime,
                    client=ObjectSpec(path="verl_rollout.client:BalancedClient"),
                    reward=None,
                    events=here.events,
                    deadline=here.within(5.0),
                )
        assert workers(here) == []

    play(case)


def test_nothing_is_left_when_a_worker_cannot_be_built() -> None:
    async def case(here: World) -> None:
        with pytest.raises(ActorFailed, match=r"agent_loop_options\.colour: unknown option"):
            await WorkerAgentLoopManager.create(
                AgentSettings(num_workers=2, loop_options={"colour": "red"}),
                runtime=here.runtime,
                client=(await here.serving(settings())).client_spec(),
                reward=None,
                events=here.events,
                deadline=here.within(5.0),
            )
        assert workers(here) == []

    play(case)


def test_close_stops_rewards_and_is_idempotent() -> None:
    async def case(here: World) -> None:
        manager = await agents(here, num_workers=2)
        rewards = [worker._reward for worker in workers(here)]
        await manager.close(deadline=here.within(5.0))
        await manager.close(deadline=here.within(5.0))
        assert [reward.closed for reward in rewards if isinstance(reward, CountingReward)] == [1, 1]

    play(case)
