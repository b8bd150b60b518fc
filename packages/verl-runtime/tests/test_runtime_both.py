"""What holds for both runtimes beyond the conformance kit: devices, messages, payload types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from actors_for_tests import Pair, PairError
from runtime_fixtures import CLOCK, all_cpus_are_free, ask, local_runtime, ray_runtime, soon, spec, wait_until

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, ConfigError, PluginError, ResourcesError, StateError, WaitTimeout
from verl_contracts.runtime import ActorSpec as Spec
from verl_contracts.runtime import Bundle, ObjectSpec, PlacementRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from verl_contracts.runtime import Runtime


@pytest.fixture(params=["local", "ray"])
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    if request.param == "local":
        async with local_runtime(num_cpus=2.0) as local:
            yield local
    else:
        request.getfixturevalue("cluster")
        async with ray_runtime() as distributed:
            await wait_until(all_cpus_are_free)
            yield distributed


def _wants(*cpus: float, pool: str = "train", gpus: float = 0.0) -> PlacementRequest:
    return PlacementRequest(pool=pool, bundles=tuple(Bundle(cpus=amount, gpus=gpus) for amount in cpus))


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (_wants(1, 1, 1), "3 x (1 CPU, 0 GPU)"),
        (_wants(4), "1 x (4 CPU, 0 GPU)"),
        (_wants(1, gpus=1), "1 x (1 CPU, 1 GPU)"),
    ],
)
async def test_place_names_wanted_and_free_when_the_machine_is_too_small(
    runtime: Runtime, request_: PlacementRequest, wanted: str
) -> None:
    began = CLOCK.now()
    with pytest.raises(ResourcesError) as caught:
        await runtime.place(request_, deadline=soon())
    assert CLOCK.now() - began < 2.0, "what can never fit is refused at once"
    text = str(caught.value)
    assert "pool 'train' wants " + wanted in text
    assert ": 2 CPU, 0 GPU; held by nobody" in text
    await runtime.place(_wants(1, 1), deadline=soon())  # nothing stayed behind


async def test_place_names_the_holder_when_devices_are_taken(runtime: Runtime) -> None:
    grant = await runtime.place(_wants(1, 1), deadline=soon())
    actor = await runtime.spawn(spec(grant=grant), deadline=soon())
    with pytest.raises(ResourcesError, match=r"pool 'more' wants .* held by pool 'train': 2 CPU") as caught:
        await runtime.place(_wants(1, pool="more"), deadline=soon(2.0))
    assert actor.name in str(caught.value)
    await runtime.release(grant)
    await runtime.place(_wants(1, pool="more"), deadline=soon())


async def test_place_refuses_a_request_for_nothing(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="no bundle"):
        await runtime.place(PlacementRequest(pool="p", bundles=()), deadline=soon())
    with pytest.raises(ConfigError, match="one of them > 0"):
        await runtime.place(_wants(0), deadline=soon())


async def test_two_holders_share_a_bundle_and_a_third_is_refused(runtime: Runtime) -> None:
    grant = (await runtime.place(_wants(1), deadline=soon())).shared(0.5)
    first = await runtime.spawn(spec("trainer", grant=grant), deadline=soon())
    second = await runtime.spawn(spec("replica", grant=grant), deadline=soon())
    with pytest.raises(ResourcesError, match=r"wants 0\.5 of bundle 0 of pool 'train'; free: 0; held by .*trainer/0"):
        await runtime.spawn(spec("judge", grant=grant), deadline=soon())
    await runtime.kill(first, deadline=soon())
    third = await runtime.spawn(spec("judge", grant=grant), deadline=soon())
    assert await ask(runtime, second, "echo", value=1) == await ask(runtime, third, "echo", value=1)


async def test_spawn_refuses_a_bundle_that_is_not_there_or_was_released(runtime: Runtime) -> None:
    grant = await runtime.place(_wants(1), deadline=soon())
    with pytest.raises(ConfigError, match="bundle 1 of pool 'train', which has bundles 0 to 0"):
        await runtime.spawn(spec(grant=grant, bundle=1), deadline=soon())
    with pytest.raises(ConfigError, match=r"share 1\.5"):
        await runtime.spawn(spec(grant=grant.shared(1.5)), deadline=soon())
    await runtime.release(grant)
    with pytest.raises(StateError, match="was released"):
        await runtime.spawn(spec(grant=grant), deadline=soon())


async def test_a_failed_start_gives_its_devices_back(runtime: Runtime) -> None:
    grant = await runtime.place(_wants(1), deadline=soon())
    for _ in range(2):
        with pytest.raises(ActorFailed, match="OSError: port 1 is taken"):
            await runtime.spawn(spec(of="Refuses", grant=grant), deadline=soon())
    await runtime.spawn(spec(grant=grant), deadline=soon())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("actors_for_tests:Wroker", "'Worker'"),
        ("actors_for_testz:Worker", "actors_for_testz"),
        ("actors_for_tests:not_a_class", "not a class"),
    ],
)
async def test_a_wrong_class_path_names_the_process_and_the_fix(runtime: Runtime, path: str, words: str) -> None:
    with pytest.raises(ActorFailed) as caught:
        await runtime.spawn(Spec(role="worker", rank=0, target=ObjectSpec(path=path)), deadline=soon())
    cause = caught.value.record.cause
    assert words in str(caught.value)
    assert "\n" not in cause, "one line"


async def test_equal_roles_and_ranks_do_not_collide(runtime: Runtime) -> None:
    one = await runtime.spawn(spec(value="one"), deadline=soon())
    two = await runtime.spawn(spec(value="two"), deadline=soon())
    assert one.name != two.name
    assert [await ask(runtime, actor, "initial") for actor in (one, two)] == ["one", "two"]


async def test_error_keeps_type_arguments_and_remote_traceback(runtime: Runtime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    with pytest.raises(PairError) as caught:
        await ask(runtime, actor, "fail", left=1, right=2)
    assert (caught.value.left, caught.value.right) == (1, 2)
    told = "\n".join(getattr(caught.value, "__notes__", [])) + repr(caught.value.__cause__)
    assert "the first cause" in told


async def test_unknown_method_names_the_nearest(runtime: Runtime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    with pytest.raises(PluginError, match="'ecko'; nearest: 'echo'"):
        await ask(runtime, actor, "ecko")
    with pytest.raises(PluginError, match="no public method '_context'"):
        await ask(runtime, actor, "_context")


async def test_call_ends_at_its_deadline_though_the_method_ignores_cancellation(runtime: Runtime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    began = CLOCK.now()
    with pytest.raises(WaitTimeout, match=r"for worker\[0\]\.ignore_cancel, held by .*/worker/0") as caught:
        await runtime.call(actor, "ignore_cancel", {"seconds": 3.0}, deadline=Deadline.after(CLOCK, 0.3))
    assert CLOCK.now() - began < 2.0
    assert caught.value.holder == actor.name


async def test_arguments_of_project_types_arrive_equal(runtime: Runtime) -> None:
    pair = Pair([1, 2], {"three": (4.0, None)})
    actor = await runtime.spawn(spec(value=pair), deadline=soon())
    assert await ask(runtime, actor, "initial") == pair
    assert await ask(runtime, actor, "echo", value=pair) == pair


async def test_kill_closes_the_object_once(runtime: Runtime, tmp_path: Path) -> None:
    note = tmp_path / "note"
    actor = await runtime.spawn(spec(note=str(note)), deadline=soon())
    await runtime.kill(actor, deadline=soon())
    await runtime.kill(actor, deadline=soon())
    assert note.read_text(encoding="utf-8") == "closed\n"


async def test_close_closes_every_object(runtime: Runtime, tmp_path: Path) -> None:
    note = tmp_path / "note"
    for rank in range(2):
        await runtime.spawn(spec(rank=rank, note=str(note)), deadline=soon())
    await runtime.close(deadline=soon())
    assert note.read_text(encoding="utf-8") == "closed\nclosed\n"
    with pytest.raises(StateError, match="is closed"):
        await runtime.place(_wants(1), deadline=soon())


async def test_exit_of_a_method_is_the_death_of_its_actor(runtime: Runtime) -> None:
    actor = await runtime.spawn(spec("judge", 4), deadline=soon())
    with pytest.raises(ActorFailed, match=r"judge\[4\] on .*: SystemExit: 3"):
        await ask(runtime, actor, "leave", code=3)
    await runtime.close(deadline=soon())
    records = [record async for record in runtime.watch()]
    assert [(record.role, record.rank, record.cause) for record in records] == [("judge", 4, "SystemExit: 3")]
