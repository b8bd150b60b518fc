"""What only the Ray runtime does: processes, their deaths, batching, payloads in Ray's store, names in a cluster."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from runtime_fixtures import CLOCK, all_cpus_are_free, ask, free, ray_runtime, soon, spec, wait_until

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, WaitTimeout
from verl_contracts.runtime import ActorSpec, Bundle, ObjectSpec, PayloadRef, PlacementRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from verl_contracts.failures import FailureRecord
    from verl_contracts.runtime import ActorRef
    from verl_runtime.ray import RayRuntime

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
async def runtime(cluster: None, tmp_path: Path) -> AsyncIterator[RayRuntime]:
    async with ray_runtime(log_dir=str(tmp_path / "logs")) as opened:
        yield opened


async def _next_failure(runtime: RayRuntime) -> FailureRecord:
    async with asyncio.timeout(20.0):
        async for record in runtime.watch():
            return record
    raise AssertionError("the channel was closed")


def _gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def test_kill_9_is_noticed_within_two_seconds_with_the_last_lines(
    runtime: RayRuntime, record_property: Callable[[str, object], None]
) -> None:
    actor = await runtime.spawn(spec("replica", 3), deadline=soon())
    pid = cast("int", await ask(runtime, actor, "pid"))
    child = cast("int", await ask(runtime, actor, "start_child"))
    await ask(runtime, actor, "say", text="loading shard 7")
    pending = asyncio.create_task(ask(runtime, actor, "pause", seconds=60.0))
    await wait_until(lambda: Path(f"/proc/{pid}").exists())
    began = time.monotonic()
    os.kill(pid, 9)
    record = await _next_failure(runtime)
    noticed_s = time.monotonic() - began
    record_property("kill_noticed_s", noticed_s)
    assert noticed_s < 2.0
    assert (record.role, record.rank) == ("replica", 3)
    assert "signal 9" in record.cause
    assert record.lines[-1] == "loading shard 7"
    for call in (pending, asyncio.create_task(ask(runtime, actor, "pid"))):
        with pytest.raises(ActorFailed, match=r"replica\[3\]"):
            await call
    await wait_until(lambda: _gone(child))  # though it ignores SIGTERM and left the process group


@pytest.mark.parametrize(
    ("method", "arguments", "cause"),
    [
        ("leave", {"code": 1}, "SystemExit: 1"),
        ("leave_hard", {"code": 5}, "os._exit(5)"),
        ("crash", {}, "Fatal Python error: Aborted"),
        ("vanish", {"text": "x"}, "killed by signal 9, or ended in another way that leaves no last words"),
    ],
)
async def test_death_has_its_first_cause(
    runtime: RayRuntime, method: str, arguments: dict[str, object], cause: str
) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    with pytest.raises(ActorFailed) as caught:
        await ask(runtime, actor, method, **arguments)
    assert caught.value.record.cause == cause
    assert len(caught.value.record.lines) <= 30
    assert (await _next_failure(runtime)).cause == cause


async def test_death_while_starting_is_told_by_spawn_and_leaves_nothing(runtime: RayRuntime) -> None:
    grant = await runtime.place(PlacementRequest(pool="p", bundles=(Bundle(),)), deadline=soon())
    for _ in range(2):
        with pytest.raises(ActorFailed, match="signal 9") as caught:
            await runtime.spawn(spec(of="DiesInInit", grant=grant), deadline=soon())
        assert caught.value.record.lines[-1] == "about to die"
    await runtime.spawn(spec(grant=grant), deadline=soon())


async def test_spawn_that_takes_too_long_is_stopped(runtime: RayRuntime, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(WaitTimeout, match=r"start of worker\[0\], held by .*/worker/0"):
        await runtime.spawn(spec(of="Slow", seconds=60.0, note=str(note)), deadline=soon(6.0))
    pid = int(note.read_text(encoding="ascii"))
    await wait_until(lambda: _gone(pid))


async def test_restart_after_a_crash_uses_the_same_role_rank_and_devices(runtime: RayRuntime) -> None:
    grant = await runtime.place(PlacementRequest(pool="p", bundles=(Bundle(),)), deadline=soon())
    for _ in range(3):
        actor = await runtime.spawn(spec("replica", 0, grant=grant), deadline=soon())
        with pytest.raises(ActorFailed):
            await ask(runtime, actor, "vanish", text="bye")
        await _next_failure(runtime)


async def test_two_runs_with_one_name_live_in_one_cluster() -> None:
    async with ray_runtime(run_id="same") as first, ray_runtime(run_id="same") as second:
        actors = [await each.spawn(spec(value=index), deadline=soon()) for index, each in enumerate((first, second))]
        await first.close(deadline=soon())
        assert await ask(second, actors[1], "initial") == 1
        with pytest.raises(ActorFailed):
            await ask(first, actors[0], "initial")


async def test_calls_of_one_tick_travel_together(
    runtime: RayRuntime, record_property: Callable[[str, object], None]
) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())

    async def burst(count: int) -> float:
        began = time.perf_counter()
        calls = [ask(runtime, actor, "echo", value=[number] * 64) for number in range(count)]
        assert await asyncio.gather(*calls) == [[number] * 64 for number in range(count)]
        return time.perf_counter() - began

    for _ in range(20):
        await burst(64)
    before = runtime.exchanges(actor)
    many = sorted([await burst(64) for _ in range(30)])[15]
    assert runtime.exchanges(actor) - before <= 2 * 30
    one = sorted([await burst(1) for _ in range(30)])[15]
    record_property("call_ms", one * 1e3)
    record_property("calls_64_ms", many * 1e3)
    assert many < 20 * one, f"64 calls took {many * 1e3:.1f} ms, one takes {one * 1e3:.1f} ms"


async def test_long_calls_of_both_kinds_do_not_delay_short_ones(runtime: RayRuntime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    long = [
        asyncio.create_task(ask(runtime, actor, "compute", seconds=2.0)),
        asyncio.create_task(ask(runtime, actor, "pause", seconds=2.0)),
    ]
    await asyncio.sleep(0)
    for number in range(20):
        assert await ask(runtime, actor, "echo", value=number) == number
    assert not any(task.done() for task in long)
    assert await asyncio.gather(*long) == [1, "rested"]


async def test_what_cannot_be_pickled_fails_its_own_call_only(runtime: RayRuntime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    good, bad_argument, bad_error, bad_result = await asyncio.gather(
        ask(runtime, actor, "echo", value=1),
        ask(runtime, actor, "echo", value=threading.Lock()),
        ask(runtime, actor, "fail_stubbornly"),
        ask(runtime, actor, "stubborn"),
        return_exceptions=True,
    )
    assert good == 1
    assert isinstance(bad_argument, TypeError)
    assert isinstance(bad_error, ActorFailed)
    assert bad_error.record.cause == "StubbornError: cannot travel"
    assert isinstance(bad_result, TypeError)


async def test_local_functions_and_classes_travel_by_value(runtime: RayRuntime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())

    class Local:
        value = 3

    function, instance = cast("tuple[object, object]", await ask(runtime, actor, "echo", value=(lambda: 4, Local())))
    assert callable(function)
    assert function() == 4
    assert getattr(instance, "value", None) == 3


async def test_large_payload_goes_from_actor_to_actor_and_arrives_writable(runtime: RayRuntime) -> None:
    one, two = [await runtime.spawn(spec(rank=rank), deadline=soon()) for rank in range(2)]
    ref = cast("PayloadRef", await ask(runtime, one, "keep", size=10_000_000))
    assert ref.num_bytes >= 10_000_000
    assert ref.value is None, "a large value does not travel inside"
    assert await ask(runtime, two, "length", ref=ref) == 10_000_000
    mine = await runtime.put(bytearray(1_000_000))
    copy = cast("bytearray", await runtime.get(mine, deadline=soon()))
    copy[0] = 1
    assert await runtime.get(mine, deadline=soon()) == bytearray(1_000_000)
    small = await runtime.put([1, 2])
    assert isinstance(small.value, bytes), "a small value travels inside, and whoever passes it on need not unpickle it"
    assert len(small.value) == small.num_bytes < 100
    assert await runtime.get(small, deadline=soon()) == [1, 2]


async def test_payload_of_a_dead_actor_is_an_error(runtime: RayRuntime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    ref = cast("PayloadRef", await ask(runtime, actor, "keep", size=1_000_000))
    await runtime.kill(actor, deadline=soon())

    async def get_until_it_fails() -> None:  # Ray keeps a copy for a moment
        async with asyncio.timeout(20.0):
            while True:
                await runtime.get(ref, deadline=soon())

    with pytest.raises(ActorFailed, match=r"payload of 1000\d+ bytes is lost"):
        await get_until_it_fails()


async def test_payloads_are_freed_with_their_last_reference(runtime: RayRuntime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    before = free("object_store_memory")
    for _ in range(60):  # 480 MB through a store of 256
        ref = await runtime.put(bytes(8_000_000))
        assert await ask(runtime, actor, "length", ref=ref) == 8_000_000
    del ref
    await wait_until(lambda: free("object_store_memory") > before - 16_000_000)


async def test_environment_and_threads_reach_the_process(runtime: RayRuntime) -> None:
    grant = await runtime.place(PlacementRequest(pool="p", bundles=(Bundle(cpus=2.0),)), deadline=soon())
    wide = await runtime.spawn(spec("wide", grant=grant), deadline=soon())
    control = await runtime.spawn(spec("control", env={"VERL_TEST": "yes"}), deadline=soon())
    assert await ask(runtime, wide, "environment", name="OMP_NUM_THREADS") == "2"
    assert await ask(runtime, control, "environment", name="OMP_NUM_THREADS") == "1"
    assert await ask(runtime, control, "environment", name="VERL_TEST") == "yes"


async def test_class_outside_the_project_is_found_where_it_is_needed(
    runtime: RayRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_the_project.py").write_text(
        "class Theirs:\n"
        "    def __init__(self, *, context, value):\n"
        "        self.value = value\n"
        "    def double(self):\n"
        "        return 2 * self.value\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    target = ObjectSpec(path="outside_the_project:Theirs", arguments={"value": 21})
    actor = await runtime.spawn(ActorSpec(role="theirs", rank=0, target=target), deadline=soon())
    assert await ask(runtime, actor, "double") == 42


async def test_output_goes_to_one_log_for_each_actor(runtime: RayRuntime, tmp_path: Path) -> None:
    actors = [await runtime.spawn(spec(rank=rank), deadline=soon()) for rank in range(2)]
    for rank, actor in enumerate(actors):
        await ask(runtime, actor, "say", text=f"hello from {rank}")
    logs = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "logs").iterdir()}
    assert logs == {"worker-0.1.log": "hello from 0\n", "worker-1.1.log": "hello from 1\n"}


async def test_kill_stops_an_actor_that_blocks_and_its_children(runtime: RayRuntime) -> None:
    actor = await runtime.spawn(spec(), deadline=soon())
    pid = cast("int", await ask(runtime, actor, "pid"))
    child = cast("int", await ask(runtime, actor, "start_child"))
    blocked = asyncio.create_task(ask(runtime, actor, "block_loop", seconds=60.0))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await runtime.kill(actor, deadline=Deadline.after(CLOCK, 3.0))
    assert time.monotonic() - began < 5.0
    with pytest.raises(ActorFailed, match="stopped by its owner"):
        await blocked
    await wait_until(lambda: _gone(pid) and _gone(child))


async def test_close_leaves_no_process_and_no_device(runtime: RayRuntime) -> None:
    import ray

    grant = await runtime.place(PlacementRequest(pool="p", bundles=(Bundle(), Bundle())), deadline=soon())
    actors: list[ActorRef] = [
        await runtime.spawn(spec(rank=rank, grant=grant, bundle=rank), deadline=soon()) for rank in range(2)
    ]
    pids = [cast("int", await ask(runtime, actor, "pid")) for actor in actors]
    children = [cast("int", await ask(runtime, actor, "start_child")) for actor in actors]
    await runtime.close(deadline=soon())
    await runtime.close(deadline=soon())
    await wait_until(lambda: all(_gone(pid) for pid in pids + children))
    await wait_until(all_cpus_are_free)
    states = [row["state"] for row in ray.util.placement_group_table().values()]
    assert set(states) <= {"REMOVED"}
