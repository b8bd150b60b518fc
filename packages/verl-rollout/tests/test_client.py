from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from service_fakes import STOP, World, logprob, request, settings, token, world

from verl_contracts.errors import DataError, NoHealthyReplica, WaitTimeout
from verl_contracts.testing.virtual import run_virtual
from verl_contracts.tokens import AbortedCompletion, Completion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from verl_contracts.rollout import BalancerRow, SupportsLora
    from verl_rollout.manager import ReplicaManager


def play(case: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world() as here:
            await case(here)

    run_virtual(main())


async def rows(here: World, manager: ReplicaManager) -> dict[str, BalancerRow]:
    await here.clock.sleep(1.0)  # releases travel in the background
    return {row.replica: row for row in await manager._balancer.snapshot()}


def whole(reply: Completion | AbortedCompletion, *, length: int = 6) -> Completion:
    """Check that a reply is the whole scripted answer, and return it."""
    assert isinstance(reply, Completion)
    assert reply.token_ids == tuple(token(index, length) for index in range(length))
    assert reply.logprobs == tuple(logprob(index) for index in range(length))
    assert [span.start for span in reply.spans] == [0, *(span.end for span in reply.spans[:-1])]
    assert reply.spans[-1].end == length
    return reply


def test_dead_replica_is_no_black_hole_for_requests_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-0": {"dies_at": 1}}))
        client = manager.client()
        for number in range(20):
            reply = whole(await client.generate(request(number), deadline=here.within(60.0)))
            assert reply.replica == "rollout-1"
        assert len(here.engine("rollout-0").requests) == 1
        assert (await rows(here, manager))["rollout-0"].state == "quarantined"
        assert "rollout-0" in caplog.text
        assert "scripted crash" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(case)


def test_requests_of_a_replica_that_dies_finish_on_the_other() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-0": {"dies_at": 3}}))
        client = manager.client()
        replies = await asyncio.gather(
            *(client.generate(request(number), deadline=here.within(60.0)) for number in range(16))
        )
        assert [reply.request_id for reply in replies] == [f"r{number}" for number in range(16)]
        for reply in replies:
            whole(reply)
        assert {row.in_flight for row in (await rows(here, manager)).values()} == {0}

    play(case)


def test_all_of_64_requests_are_answered_once_when_one_process_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings())
        client = manager.client()
        answered: Counter[str] = Counter()

        async def ask(number: int) -> None:
            answered[whole(await client.generate(request(number), deadline=here.within(60.0))).request_id] += 1

        tasks = [asyncio.create_task(ask(number)) for number in range(64)]
        await here.clock.sleep(0.025)
        assert 0 < len(here.engine("rollout-1").requests) < 64
        here.runtime.fail(manager._held["rollout-1"].proxy.address.actor, "killed by signal 9")
        await asyncio.gather(*tasks)
        assert answered == Counter({f"r{number}": 1 for number in range(64)})
        assert "replica rollout-1 is quarantined: killed by signal 9" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(case)


def test_error_names_every_replica_and_its_first_exception_when_all_are_dead() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"dies_at": 2}}))
        client = manager.client()
        with pytest.raises(NoHealthyReplica, match=r"rollout-0: RuntimeError: scripted crash; rollout-1: Runtime"):
            await asyncio.gather(*(client.generate(request(n), deadline=here.within(60.0)) for n in range(9)))
        assert here.clock.now() < 10.0

    play(case)


@pytest.mark.parametrize("script", [{"empty": True}, {"raises_at": 1}, {"misbuilt": True}])
def test_replica_that_answers_nothing_or_raises_is_quarantined(script: dict[str, object]) -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-0": script}))
        client = manager.client()
        for number in range(6):
            whole(await client.generate(request(number), deadline=here.within(60.0)))
        assert (await rows(here, manager))["rollout-0"].state == "quarantined"

    play(case)


def test_replica_that_hangs_is_given_up_after_the_request_limit() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-0": {"hangs": True}}, request_limit_s=5.0))
        client = manager.client()
        for number in range(4):
            whole(await client.generate(request(number), deadline=here.within(60.0)))
        assert 5.0 <= here.clock.now() < 6.0
        assert (await rows(here, manager))["rollout-0"].state == "quarantined"

    play(case)


def test_callers_own_deadline_says_nothing_about_the_replica() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"hangs": True}}, num_replicas=1))
        with pytest.raises(WaitTimeout):
            await manager.client().generate(request(), deadline=here.within(2.0))
        assert (await rows(here, manager))["rollout-0"].state == "active"
        assert (await rows(here, manager))["rollout-0"].in_flight == 0

    play(case)


def test_request_that_can_never_be_served_is_no_failure_of_a_replica() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings())
        with pytest.raises(DataError, match="62 \\+ 6 tokens > 64"):
            await manager.client().generate(request(prompt_ids=(1,) * 62), deadline=here.within(60.0))
        assert {row.state for row in (await rows(here, manager)).values()} == {"active"}
        assert sum(len(here.engine(f"rollout-{rank}").requests) for rank in (0, 1)) == 1

    play(case)


def test_cancelled_request_stops_and_gives_its_lease_back() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"hangs": True}}, num_replicas=1))
        task = asyncio.ensure_future(manager.client().generate(request(), deadline=here.within(600.0)))
        await here.clock.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        row = (await rows(here, manager))["rollout-0"]
        assert (row.in_flight, row.state) == (0, "active")
        assert here.engine("rollout-0").status().running == 0

    play(case)


def test_replica_with_weights_too_old_for_the_request_is_not_asked_again() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings())
        await here.sync(manager.replicas()[1], 3)
        for number in range(4):
            reply = await manager.client().generate(request(number, min_version=3), deadline=here.within(60.0))
            assert whole(reply).replica == "rollout-1"
        assert len(here.engine("rollout-0").requests) <= 1

    play(case)


def test_replica_added_later_is_reached_by_an_old_client() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings(num_replicas=1))
        client = manager.client()
        (added,) = await manager.add(1, deadline=here.within(60.0))
        await here.sync(added, 0)
        await manager.admit([added.replica_id])
        served = {
            whole(await client.generate(request(number), deadline=here.within(60.0))).replica for number in range(4)
        }
        assert served == {"rollout-0", "rollout-1"}

    play(case)


def test_late_answer_after_removal_and_return_changes_no_count() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"token_s": 1.0}}, num_replicas=1))
        task = asyncio.ensure_future(manager.client().generate(request(), deadline=here.within(60.0)))
        await here.clock.sleep(0.5)
        await manager.exclude(["rollout-0"])
        await manager.admit(["rollout-0"])
        whole(await task)
        row = (await rows(here, manager))["rollout-0"]
        assert (row.in_flight, row.epoch, row.state) == (0, 2, "active")

    play(case)


def test_sequence_goes_back_to_the_replica_that_holds_its_cache() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"abort_after": [2, 2, 2]}}, num_replicas=4))
        whole(await manager.client().generate(request(), deadline=here.within(60.0)))
        asked = [len(here.engine(f"rollout-{rank}").requests) for rank in range(4)]
        assert sorted(asked)[:3] == [0, 0, 0]

    play(case)


def test_tokens_so_far_are_kept_when_the_replica_dies_on_the_way() -> None:
    async def case(here: World) -> None:
        script = {"rollout-0": {"abort_after": [4], "dies_at": 2}}
        manager = await here.serving(settings(script))
        reply = whole(await manager.client().generate(request(), deadline=here.within(60.0)))
        assert reply.replica == "rollout-1"
        (resumed,) = here.engine("rollout-1").requests
        assert (resumed.resumed_tokens, resumed.sampling.max_tokens, len(resumed.prompt_ids)) == (4, 2, 7)

    play(case)


def test_pause_of_a_sync_is_not_noticed_by_the_caller() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"token_s": 1.0}}, num_replicas=1))
        task = asyncio.ensure_future(manager.client().generate(request(), deadline=here.within(60.0)))
        await here.clock.sleep(3.5)
        await here.sync(manager.replicas()[0], 1)
        reply = whole(await task)
        assert [(span.version, span.start, span.end) for span in reply.spans] == [(0, 0, 3), (1, 3, 6)]

    play(case)


def test_adapter_is_asked_for_in_every_attempt() -> None:
    async def case(here: World) -> None:
        scripts = {"*": {"takes_adapters": True, "abort_after": (2, 1)}}
        manager = await here.serving(settings(scripts, num_replicas=1))
        adapting = cast("SupportsLora", manager.replicas()[0])
        await adapting.load_adapter("a", folder="somewhere", deadline=here.within(5.0))
        asked = replace(request(0), adapter="a")
        whole(await manager.client().generate(asked, deadline=here.within(60.0)))
        requests = here.engine("rollout-0").requests
        assert [(each.resumed_tokens, each.adapter) for each in requests] == [(0, "a"), (2, "a"), (3, "a")]

    play(case)


def test_unknown_adapter_is_no_failure_of_a_replica() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings())
        with pytest.raises(DataError, match="asks for adapter 'a', and this replica takes none"):
            await manager.client().generate(replace(request(0), adapter="a"), deadline=here.within(60.0))
        assert {row.state for row in (await rows(here, manager)).values()} == {"active"}

    play(case)


def test_client_that_does_not_resume_returns_what_was_cut_as_such() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"abort_after": [5]}}, resumable=False, num_replicas=1))
        reply = await manager.client().generate(request(), deadline=here.within(60.0))
        assert isinstance(reply, AbortedCompletion)
        assert len(reply.token_ids) == 5
        row = (await rows(here, manager))["rollout-0"]
        assert (row.in_flight, row.state) == (0, "active")

    play(case)


def test_cap_of_attempts_returns_what_there_is() -> None:
    async def case(here: World) -> None:
        chosen = settings({"*": {"abort_after": [1] * 9}}, num_replicas=1, options={"max_attempts": 3})
        reply = await (await here.serving(chosen)).client().generate(request(), deadline=here.within(60.0))
        assert isinstance(reply, AbortedCompletion)
        assert reply.token_ids == (100, 101, 102)
        assert len(here.engine("rollout-0").requests) == 3

    play(case)


def test_sampling_parameters_shared_by_ten_calls_are_untouched() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"abort_after": [0, 1, 2, 3, 4, 5, 1, 2]}}))
        client = manager.client()
        shared = request().sampling
        before = replace(shared)
        asked = [replace(request(number), sampling=shared) for number in range(10)]
        for reply in await asyncio.gather(*(client.generate(each, deadline=here.within(60.0)) for each in asked)):
            whole(reply)
        assert shared == before
        assert all(each.sampling is shared for each in asked)

    play(case)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=8),
    length=st.integers(1, 12),
    max_tokens=st.integers(1, 12),
    already=st.integers(0, 3),
)
def test_resumed_sequence_equals_the_uninterrupted_one(
    cuts: list[int], length: int, max_tokens: int, already: int
) -> None:
    async def case(here: World) -> None:
        script = {"*": {"abort_after": cuts, "length": length + already}}
        manager = await here.serving(settings(script, num_replicas=1))
        asked = request(max_tokens=max_tokens, prompt_ids=(1,) * (3 + already), resumed_tokens=already)
        reply = await manager.client().generate(asked, deadline=here.within(60.0))
        count = min(length, max_tokens)
        assert isinstance(reply, Completion)
        assert reply.token_ids == tuple(token(already + index, length + already) for index in range(count))
        assert reply.logprobs == tuple(logprob(already + index) for index in range(count))
        assert [(span.start, span.end) for span in reply.spans] == [(0, count)]
        assert reply.finish_reason == ("stop" if length <= max_tokens else "length")
        assert (reply.token_ids[-1] == STOP) == (length <= max_tokens)
        for each in here.engine("rollout-0").requests:
            assert len(each.prompt_ids) + each.sampling.max_tokens == len(asked.prompt_ids) + max_tokens
            assert len(each.prompt_ids) - each.resumed_tokens == 3

    play(case)
