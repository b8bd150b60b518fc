from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from service_fakes import World, request, settings, world

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, ConfigError, NoHealthyReplica, PluginError, ResourcesError, StateError
from verl_contracts.plugins import families, load_plugin
from verl_contracts.rollout import DEAD, INVALID, LORA, PAUSED, SERVING
from verl_contracts.runtime import Bundle, PlacementRequest
from verl_contracts.testing.virtual import run_virtual
from verl_contracts.weights import Manifest, Plan
from verl_rollout.manager import ReplicaManager

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from verl_contracts.rollout import RolloutSettings, SupportsLora, SupportsOpenAI
    from verl_contracts.runtime import DeviceGrant


def play(case: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world() as here:
            await case(here)

    run_virtual(main())


async def on_grant(here: World, chosen: RolloutSettings, devices: int, *, start_rank: int | None) -> ReplicaManager:
    grant = await grant_of(here, devices)
    return await ReplicaManager.create(
        chosen,
        runtime=here.runtime,
        grant=grant.shared(0.5),
        start_rank=start_rank,
        events=here.events,
        deadline=here.within(60.0),
    )


async def grant_of(here: World, devices: int) -> DeviceGrant:
    return await here.runtime.place(
        PlacementRequest(pool="trainer", bundles=(Bundle(),) * devices), deadline=here.within(5.0)
    )


def placed(here: World) -> dict[str, int]:
    return {grant.pool: len(grant.bundles) for grant in here.runtime._grants.values()}


def live(here: World) -> list[str]:
    return [name.split("#")[0] for name, held in here.runtime._actors.items() if held.dead is None]


def test_default_manager_is_found_by_name_and_meets_the_contract() -> None:
    assert load_plugin(families.LLM_SERVER_MANAGER, "default", key="k") is ReplicaManager


def test_new_replica_is_invalid_and_serves_only_once_admitted() -> None:
    async def case(here: World) -> None:
        manager = await here.manager(settings())
        for replica in manager.replicas():
            assert (await replica.status(deadline=here.within(5.0))).state == INVALID
        with pytest.raises(NoHealthyReplica, match="none was ever admitted"):
            await manager.client().generate(request(), deadline=here.within(5.0))
        with pytest.raises(StateError):
            await manager.replicas()[0].generate(request(), deadline=here.within(5.0))

    play(case)


def test_replicas_on_a_grant_take_one_place_per_devices_and_never_release_it() -> None:
    async def case(here: World) -> None:
        manager = await on_grant(here, settings(num_replicas=9), 3, start_rank=None)
        assert [replica.replica_id for replica in manager.replicas()] == ["rollout-0", "rollout-1", "rollout-2"]
        await manager.close(deadline=here.within(60.0))
        assert placed(here) == {"trainer": 3}
        assert live(here) == []

    play(case)


def test_adapters_reach_the_replicas_that_claim_them() -> None:
    async def case(here: World) -> None:
        manager = await here.manager(settings({"rollout-1": {"takes_adapters": True}}))
        plain, adapting = (cast("SupportsLora", replica) for replica in manager.replicas())
        assert [LORA in replica.capabilities for replica in manager.replicas()] == [False, True]
        limit = here.within(5.0)
        await adapting.load_adapter("a", folder="somewhere", deadline=limit)
        assert await adapting.adapters(deadline=limit) == ("a",)
        await adapting.unload_adapter("a", deadline=limit)
        assert await adapting.adapters(deadline=limit) == ()
        for call in (
            plain.load_adapter("a", folder="somewhere", deadline=limit),
            plain.unload_adapter("a", deadline=limit),
            plain.adapters(deadline=limit),
        ):
            with pytest.raises(StateError, match="rollout-0 takes no adapters"):
                await call

    play(case)


def test_addresses_are_those_of_the_replicas_that_answer_the_openai_protocol() -> None:
    async def case(here: World) -> None:
        manager = await here.manager(settings({"rollout-1": {"speaks_openai": True}}))
        assert manager.addresses() == ("http://rollout-1/v1",)
        mute, speaking = (cast("SupportsOpenAI", replica) for replica in manager.replicas())
        endpoint = await speaking.openai_endpoint(deadline=here.within(5.0))
        assert (endpoint.base_url, endpoint.api_key) == ("http://rollout-1/v1", "key")
        with pytest.raises(StateError, match="rollout-0 does not answer the OpenAI protocol"):
            await mute.openai_endpoint(deadline=here.within(5.0))
        await manager.remove(["rollout-1"], deadline=here.within(60.0))
        assert manager.addresses() == ()

    play(case)


def test_start_rank_numbers_replicas_after_those_of_another_manager() -> None:
    async def case(here: World) -> None:
        hybrid = await on_grant(here, settings(), 2, start_rank=None)
        standalone = await here.manager(settings(num_replicas=1), start_rank=2)
        assert [replica.replica_id for replica in hybrid.replicas()] == ["rollout-0", "rollout-1"]
        assert [replica.replica_id for replica in standalone.replicas()] == ["rollout-2"]
        assert standalone.replicas()[0].capacity == 8

    play(case)


def test_two_managers_with_equal_ranks_both_start() -> None:
    async def case(here: World) -> None:
        first, second = await here.serving(settings()), await here.serving(settings())
        for manager in (first, second):
            await manager.client().generate(request(), deadline=here.within(5.0))
            assert len(await manager._balancer.snapshot()) == 2

    play(case)


def test_bundles_that_make_no_whole_replica_are_refused() -> None:
    async def case(here: World) -> None:
        grant = await grant_of(here, 3)
        chosen = settings()
        two_each = replace(chosen, devices_per_replica=2)
        with pytest.raises(ConfigError, match=r"'trainer' has 3 devices, and a replica takes 2"):
            await ReplicaManager.create(
                two_each,
                runtime=here.runtime,
                grant=grant,
                start_rank=None,
                events=here.events,
                deadline=here.within(5.0),
            )
        assert live(here) == []

    play(case)


def test_nothing_is_left_when_one_replica_does_not_start() -> None:
    async def case(here: World) -> None:
        with pytest.raises(ActorFailed, match="rollout-1 does not start"):
            await here.manager(settings({"rollout-1": {"fails_to_start": True}}, num_replicas=3))
        assert live(here) == []
        assert placed(here) == {}

    play(case)


def test_nothing_is_left_when_there_is_no_room() -> None:
    async def case(here: World) -> None:
        with pytest.raises(ResourcesError, match="wants 65"):
            await here.manager(settings(num_replicas=65))
        assert live(here) == []
        assert placed(here) == {}

    play(case)


def test_failed_addition_leaves_the_others_serving() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-3": {"fails_to_start": True}}))
        with pytest.raises(ActorFailed, match="rollout-3"):
            await manager.add(2, deadline=here.within(5.0))
        assert [replica.replica_id for replica in manager.replicas()] == ["rollout-0", "rollout-1"]
        assert placed(here) == {"rollout-0": 2}
        (added,) = await manager.add(1, deadline=here.within(5.0))
        assert added.replica_id == "rollout-4"

    play(case)


def test_removal_waits_for_what_runs_and_gives_the_pool_back() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"token_s": 1.0}}))
        tasks = [
            asyncio.ensure_future(manager.client().generate(request(n), deadline=here.within(60.0))) for n in range(2)
        ]
        await here.clock.sleep(0.5)
        await manager.remove(["rollout-0"], deadline=here.within(60.0))
        assert here.clock.now() == pytest.approx(6.0, abs=0.1)
        await asyncio.gather(*tasks)
        assert placed(here) == {"rollout-0": 2}
        await manager.remove(["rollout-1"], deadline=here.within(60.0))
        assert placed(here) == {}
        with pytest.raises(StateError, match="rollout-0 is not here"):
            await manager.admit(["rollout-0"])

    play(case)


def test_dead_replica_is_removed_at_once_and_replaced() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-0": {"dies_at": 1}}))
        client = manager.client()
        await client.generate(request(0), deadline=here.within(60.0))
        assert (await manager.replicas()[0].status(deadline=here.within(5.0))).state == DEAD
        await manager.remove(["rollout-0"], deadline=here.within(60.0))
        (added,) = await manager.add(1, deadline=here.within(60.0))
        await here.sync(added, 4)
        await manager.admit([added.replica_id])
        replicas = {(await client.generate(request(n), deadline=here.within(60.0))).replica for n in range(4)}
        assert replicas == {"rollout-1", "rollout-2"}
        assert here.clock.now() < 5.0

    play(case)


def test_dead_replica_is_replaced_on_its_own_device_when_there_is_no_other() -> None:
    async def case(here: World) -> None:
        grant = await grant_of(here, 62)
        own = await here.serving(settings())
        hybrid = await ReplicaManager.create(
            settings(),
            runtime=here.runtime,
            grant=grant.shared(0.5),
            start_rank=2,
            events=here.events,
            deadline=here.within(5.0),
        )
        before = placed(here)
        for manager in (own, hybrid):
            last = manager.replicas()[-1]
            await manager.remove([last.replica_id], deadline=here.within(5.0))
            await manager.add(1, deadline=here.within(5.0))
            with pytest.raises(ResourcesError):
                await manager.add(1, deadline=here.within(5.0))
        assert placed(here) == before

    play(case)


def test_death_of_an_engine_is_reported_once_with_its_first_cause() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"rollout-0": {"dies_at": 1}}, num_replicas=1))
        for _ in range(3):
            with pytest.raises(ActorFailed, match=r"rollout\[0\].*scripted crash"):
                await manager.replicas()[0].generate(request(), deadline=here.within(5.0))
        assert here.runtime._failures.qsize() == 1

    play(case)


def test_excluded_replica_finishes_what_it_runs_and_gets_no_more() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings())
        client = manager.client()
        tasks = [asyncio.ensure_future(client.generate(request(n), deadline=here.within(60.0))) for n in range(4)]
        await here.clock.sleep(0.005)
        await manager.exclude(["rollout-0"])
        replies = await asyncio.gather(*tasks)
        assert {reply.replica for reply in replies} == {"rollout-0", "rollout-1"}
        before = len(here.engine("rollout-0").requests)
        await manager.exclude(["rollout-0"])
        for number in range(4):
            await client.generate(request(number), deadline=here.within(60.0))
        assert len(here.engine("rollout-0").requests) == before

    play(case)


def test_requests_inside_a_replica_whose_sync_failed_go_elsewhere() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"token_s": 1.0}}))
        client = manager.client()
        tasks = [asyncio.ensure_future(client.generate(request(n), deadline=here.within(60.0))) for n in range(4)]
        await here.clock.sleep(2.5)
        broken = manager.replicas()[0]
        await broken.pause("keep", deadline=here.within(5.0))
        here.engine("rollout-0").begin_update()
        await manager.exclude(["rollout-0"])
        replies = await asyncio.gather(*tasks)
        assert {reply.replica for reply in replies} == {"rollout-1"}
        assert {reply.token_ids for reply in replies} == {(100, 101, 102, 103, 104, 7)}

    play(case)


def test_replica_is_invalid_from_the_first_byte_until_the_commit() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings(num_replicas=1))
        (replica,) = manager.replicas()
        host, limit = replica.receiver_host, here.within(60.0)
        manifest = Manifest(version=1, tensors=(), num_bytes=0)
        endpoints = tuple(await host.prepare(manifest, session="s", deadline=limit))
        plan = Plan(session="s", version=1, manifest=manifest, senders=(), receivers=endpoints, bucket_bytes=1)
        with pytest.raises(StateError, match="paused"):
            await host.transfer(plan, deadline=limit)
        await replica.pause("wait", deadline=limit)
        assert (await replica.status(deadline=limit)).state == PAUSED
        await host.transfer(plan, deadline=limit)
        assert (await replica.status(deadline=limit)).state == INVALID
        await host.abort("test", deadline=limit)
        await host.close(deadline=limit)
        with pytest.raises(StateError, match="nothing is prepared"):
            await host.transfer(plan, deadline=limit)
        await here.sync(replica, 1)
        assert (await replica.status(deadline=limit)).state == SERVING

    play(case)


def test_close_is_idempotent_and_leaves_nothing() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings())
        await manager.close(deadline=here.within(60.0))
        await manager.close(deadline=here.within(60.0))
        assert live(here) == []
        assert placed(here) == {}

    play(case)


def test_cancelled_start_leaves_nothing() -> None:
    async def case(here: World) -> None:
        task = asyncio.ensure_future(here.manager(settings(num_replicas=2)))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert live(here) == []
        assert placed(here) == {}

    play(case)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue_factr": 3}, "llm_server_manager_options.queue_factr: unknown option; nearest: 'queue_factor'"),
        ({"queue_factor": 0.5}, "queue_factor must be at least 1"),
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], message: str) -> None:
    async def case(here: World) -> None:
        with pytest.raises(ConfigError, match=message):
            await here.manager(settings(options=options))
        assert live(here) == []

    play(case)


def test_unknown_engine_is_refused_before_anything_starts() -> None:
    async def case(here: World) -> None:
        chosen = settings()
        wrong = replace(chosen, engine="torhc")
        words = r"rollout\.name: no inference engine.*'torhc'; nearest: 'torch'"
        with pytest.raises(PluginError, match=words):
            await here.manager(wrong)
        with pytest.raises(PluginError, match=words):
            ReplicaManager.check(wrong)
        assert live(here) == []

    play(case)


def test_deadline_of_a_call_reaches_the_engine() -> None:
    async def case(here: World) -> None:
        manager = await here.serving(settings({"*": {"hangs": True}}, num_replicas=1))
        (replica,) = manager.replicas()
        task = asyncio.ensure_future(replica.generate(request(), deadline=Deadline.after(here.clock, 3.0)))
        await here.clock.sleep(1.0)
        assert (await replica.status(deadline=here.within(1.0))).running == 1
        await asyncio.gather(task, return_exceptions=True)
        assert here.clock.now() == pytest.approx(3.0, abs=0.1)
        await here.clock.sleep(0.1)
        assert (await replica.status(deadline=here.within(1.0))).running == 0

    play(case)
