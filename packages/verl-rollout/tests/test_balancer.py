from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_fakes import World, world

from verl_contracts.clock import Deadline
from verl_contracts.errors import NoHealthyReplica, WaitTimeout
from verl_contracts.rollout import FAILURE, SUCCESS, Lease, LoadBalancer
from verl_contracts.runtime import ActorSpec, ObjectSpec, RuntimeSettings
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.suites.balancer import LoadBalancerSuite
from verl_contracts.testing.virtual import VirtualClock, run_virtual
from verl_rollout.balancer import LeastLoadedBalancer
from verl_rollout.remote_balancer import RemoteBalancer

if TYPE_CHECKING:
    from verl_contracts.clock import Clock


class TestLeastLoaded(LoadBalancerSuite):
    async def balancer(self, clock: Clock) -> LoadBalancer:
        return LeastLoadedBalancer(clock=clock)


class TestRemote(LoadBalancerSuite):
    async def balancer(self, clock: Clock) -> LoadBalancer:
        runtime = await InProcessRuntime.create(
            RuntimeSettings(run_id="test"), clock=clock, events=RecordingEvents(clock)
        )
        return await _remote(runtime, clock)


async def _remote(runtime: InProcessRuntime, clock: Clock) -> RemoteBalancer:
    target = ObjectSpec(path="verl_rollout.remote_balancer:BalancerActor")
    spec = ActorSpec(role="balancer", rank=0, target=target)
    actor = await runtime.spawn(spec, deadline=Deadline.after(clock, 5.0))
    return RemoteBalancer(caller=runtime, clock=clock, actor=actor)


def _run(case: Coroutine[object, object, None]) -> None:
    run_virtual(case)


def _clock() -> Clock:
    return VirtualClock(asyncio.get_running_loop())


async def _routes(balancer: LoadBalancer, clock: Clock, count: int) -> list[str]:
    routes = []
    for _ in range(count):
        (lease,) = await balancer.acquire(1, keys=(None,), deadline=Deadline.after(clock, 1.0))
        routes.append(lease.replica)
        await balancer.release((lease,), SUCCESS)
    return routes


def test_routes_are_the_same_when_repeated() -> None:
    async def case() -> None:
        runs = []
        for _ in range(2):
            balancer = LeastLoadedBalancer(clock=_clock())
            for number in range(4):
                await balancer.add(f"r{number}", capacity=4)
            runs.append(await _routes(balancer, _clock(), 200))
        assert runs[0] == runs[1]
        assert [runs[0].count(f"r{number}") for number in range(4)] == [50] * 4

    _run(case())


def test_error_names_each_replica_with_its_first_failure() -> None:
    async def case() -> None:
        clock = _clock()
        balancer = LeastLoadedBalancer(clock=clock)
        await balancer.add("r0", capacity=2)
        await balancer.add("r1", capacity=1)
        leases = await balancer.acquire(3, keys=(None,) * 3, deadline=Deadline.after(clock, 1.0))
        await balancer.release(leases[:1], FAILURE, reason="RuntimeError: first")
        await balancer.release(leases[2:], FAILURE, reason="RuntimeError: later")
        await balancer.remove("r1")
        with pytest.raises(NoHealthyReplica, match=r"r0: RuntimeError: first; r1: removed"):
            await balancer.acquire(1, keys=(None,), deadline=Deadline.after(clock, 1.0))

    _run(case())


def test_lease_of_a_dead_holder_is_taken_back_while_another_waits() -> None:
    async def case() -> None:
        clock = _clock()
        balancer = LeastLoadedBalancer(clock=clock, lease_limit_s=100.0)
        await balancer.add("r0", capacity=1)
        (lost,) = await balancer.acquire(1, keys=(None,), deadline=Deadline.after(clock, 1.0))
        (next_lease,) = await balancer.acquire(1, keys=(None,), deadline=Deadline.after(clock, 500.0))
        assert clock.now() == pytest.approx(100.0)
        await balancer.release((lost,), FAILURE)
        (row,) = await balancer.snapshot()
        assert (row.in_flight, row.state, next_lease.replica) == (1, "active", "r0")

    _run(case())


def test_grant_on_its_way_to_a_caller_who_gave_up_comes_back() -> None:
    async def case() -> None:
        async with world() as here:
            await _check_given_up(here)

    _run(case())


async def _check_given_up(here: World) -> None:
    balancer = await _remote(here.runtime, here.clock)
    await balancer.add("r0", capacity=1)
    for ticks in range(12):
        task = asyncio.ensure_future(balancer.acquire(1, keys=(None,), deadline=here.within(5.0)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        ended = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended[0], tuple):
            await balancer.release(ended[0], SUCCESS)
        await here.clock.sleep(0.1)
        (row,) = await balancer.snapshot()
        assert row.in_flight == 0, f"cancelled after {ticks} ticks"


def test_many_sticky_keys_keep_memory_flat() -> None:
    async def case() -> None:
        clock = _clock()
        balancer = LeastLoadedBalancer(clock=clock)
        await balancer.add("r0", capacity=4)
        for number in range(70_000):
            await balancer.release(
                await balancer.acquire(1, keys=(f"k{number}",), deadline=Deadline.after(clock, 1.0)), SUCCESS
            )
        assert len(balancer._served) == 65536
        assert not balancer._leases

    _run(case())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.integers(1, 4), st.sampled_from([None, "a", "b", "c"])),
        st.tuples(st.just("release"), st.integers(0, 30), st.sampled_from(["success", "failure", "aborted"])),
        st.tuples(st.just("again"), st.integers(0, 30), st.sampled_from(["success", "failure"])),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
        st.tuples(st.just("add"), st.integers(0, 3), st.none()),
        st.tuples(st.just("drain"), st.integers(0, 3), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 3), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=_STEPS)
def test_counts_equal_the_leases_held_whatever_happens(steps: list[tuple[str, int, str | None]]) -> None:
    _run(_History().play(steps))


class _History:
    """Plays steps against a balancer, and keeps its own books: the leases that callers hold, and their epochs."""

    def __init__(self) -> None:
        self.held: list[Lease] = []
        self.given_back: list[Lease] = []
        self.waiting: list[asyncio.Task[tuple[Lease, ...]]] = []
        self.drains: list[asyncio.Task[None]] = []

    async def play(self, steps: list[tuple[str, int, str | None]]) -> None:
        self.clock = _clock()
        self.balancer = LeastLoadedBalancer(clock=self.clock)
        await self.balancer.add("r0", capacity=3)
        for step in steps:
            await self._step(*step)
            await self.clock.sleep(0.001)
            await self._collect()
            await self._check()
        await self.clock.sleep(1000.0)
        await self._collect()
        assert not self.waiting, "every wait ends at its deadline"
        await asyncio.gather(*self.drains, return_exceptions=True)
        await self._check()

    async def _step(self, kind: str, number: int, extra: str | None) -> None:
        replica = f"r{number}"
        if kind == "acquire":
            call = self.balancer.acquire(number, keys=(extra,) * number, deadline=Deadline.after(self.clock, 100.0))
            self.waiting.append(asyncio.create_task(call))
        elif kind == "release" and self.held:
            lease = self.held.pop(number % len(self.held))
            self.given_back.append(lease)
            await self.balancer.release((lease,), FAILURE if extra == "failure" else SUCCESS)
        elif kind == "again" and self.given_back:
            before = await self.balancer.snapshot()
            await self.balancer.release((self.given_back[number % len(self.given_back)],), FAILURE)
            assert await self.balancer.snapshot() == before
        elif kind == "cancel" and self.waiting:
            self.waiting[number % len(self.waiting)].cancel()
        elif kind == "add":
            await self.balancer.add(replica, capacity=3)
        elif kind == "drain":
            self.drains.append(
                asyncio.create_task(self.balancer.drain(replica, deadline=Deadline.after(self.clock, 50.0)))
            )
        elif kind == "remove":
            await self.balancer.remove(replica)

    async def _collect(self) -> None:
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self.held.extend(task.result())
            else:
                assert isinstance(error, NoHealthyReplica | WaitTimeout)

    async def _check(self) -> None:
        rows = await self.balancer.snapshot()
        assert len({lease.lease_id for lease in self.held + self.given_back}) == len(self.held + self.given_back)
        for row in rows:
            mine = [lease for lease in self.held if (lease.replica, lease.epoch) == (row.replica, row.epoch)]
            assert row.in_flight == len(mine)
            assert row.in_flight <= row.capacity
        if not any(row.state == "active" for row in rows):
            assert not self.waiting, "nobody waits for replicas of which none may serve"
