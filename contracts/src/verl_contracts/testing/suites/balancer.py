# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of a `LoadBalancer`: capacity, evenness, stickiness, and what failures and stale leases change.

Runs in virtual time unless `virtual` is set to False, as a balancer behind a proxy in another process needs.
"""

from __future__ import annotations

import abc
import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from verl_contracts.clock import Deadline
from verl_contracts.errors import NoHealthyReplica, WaitTimeout
from verl_contracts.rollout import ABORTED, FAILURE, SUCCESS
from verl_contracts.testing.suites.base import ContractSuite

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import BalancerRow, Lease, LoadBalancer

__all__ = ["LoadBalancerSuite"]


async def _one(balancer: LoadBalancer, clock: Clock, key: str | None = None, *, limit_s: float = 5.0) -> Lease:
    (lease,) = await balancer.acquire(1, keys=[key], deadline=Deadline.after(clock, limit_s))
    return lease


async def _in_flight(balancer: LoadBalancer) -> dict[str, int]:
    return {row.replica: row.in_flight for row in await balancer.snapshot()}


async def _row(balancer: LoadBalancer, replica: str) -> BalancerRow:
    return next(row for row in await balancer.snapshot() if row.replica == replica)


async def _waits(task: asyncio.Task[object], clock: Clock) -> None:
    """Let `task` run, and check that it is blocked."""
    await clock.sleep(0.05)
    assert not task.done()


class LoadBalancerSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `balancer`."""

    virtual = True

    @abc.abstractmethod
    def balancer(self, clock: Clock) -> Awaitable[LoadBalancer]:
        """Return a balancer without replicas."""

    async def _with(self, clock: Clock, *capacities: int) -> LoadBalancer:
        balancer = await self.balancer(clock)
        for number, capacity in enumerate(capacities):
            await balancer.add(f"r{number}", capacity=capacity)
        return balancer

    def test_idle_replicas_share_evenly(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 8, 8, 8, 8)
            served: Counter[str] = Counter()
            for _ in range(200):
                lease = await _one(balancer, clock)
                served[lease.replica] += 1
                await balancer.release([lease], SUCCESS)
            assert set(served) == {"r0", "r1", "r2", "r3"}
            assert all(40 <= count <= 60 for count in served.values()), f"50 each expected within 20 %: {served}"

        self.run(case)

    def test_many_leases_at_once_are_spread(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 4, 4)
            leases = await balancer.acquire(6, keys=[None] * 6, deadline=Deadline.after(clock, 5.0))
            assert Counter(lease.replica for lease in leases) == {"r0": 3, "r1": 3}
            assert len({lease.lease_id for lease in leases}) == 6

        self.run(case)

    def test_least_loaded_replica_is_preferred(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 4)
            for _ in range(3):
                await _one(balancer, clock)
            await balancer.add("late", capacity=4)
            assert [(await _one(balancer, clock)).replica for _ in range(3)] == ["late"] * 3

        self.run(case)

    def test_capacity_is_never_exceeded_and_a_release_lets_the_next_in(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1, 2)
            leases = await balancer.acquire(3, keys=[None] * 3, deadline=Deadline.after(clock, 5.0))
            assert await _in_flight(balancer) == {"r0": 1, "r1": 2}
            waiting: asyncio.Task[object] = asyncio.create_task(_one(balancer, clock))
            await _waits(waiting, clock)
            freed = next(lease for lease in leases if lease.replica == "r0")
            await balancer.release([freed], SUCCESS)
            lease = await waiting
            assert await _in_flight(balancer) == {"r0": 1, "r1": 2}, f"granted {lease}"

        self.run(case)

    def test_waiting_calls_are_served_in_order(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1)
            lease = await _one(balancer, clock)
            order: list[int] = []

            async def take(number: int) -> None:
                mine = await _one(balancer, clock)
                order.append(number)
                await balancer.release([mine], SUCCESS)

            tasks: list[asyncio.Task[None]] = []
            for number in range(5):
                tasks.append(asyncio.create_task(take(number)))
                await clock.sleep(0.01)
            await balancer.release([lease], SUCCESS)
            await asyncio.gather(*tasks)
            assert order == [0, 1, 2, 3, 4]

        self.run(case)

    def test_key_returns_to_the_replica_that_served_it(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 8, 8, 8)
            first = await _one(balancer, clock, "conversation")
            await balancer.release([first], SUCCESS)
            others = [await _one(balancer, clock) for _ in range(4)]
            again = await _one(balancer, clock, "conversation")
            assert again.replica == first.replica
            await balancer.release([*others, again], SUCCESS)

        self.run(case)

    def test_key_moves_when_its_replica_may_not_serve(self) -> None:
        async def case(clock: Clock) -> None:
            for end in ("quarantine", "remove", "drain"):
                balancer = await self._with(clock, 4, 4)
                first = await _one(balancer, clock, "c")
                await balancer.release([first], FAILURE if end == "quarantine" else SUCCESS)
                if end == "remove":
                    await balancer.remove(first.replica)
                elif end == "drain":
                    await balancer.drain(first.replica, deadline=Deadline.after(clock, 5.0))
                assert (await _one(balancer, clock, "c")).replica != first.replica, end

        self.run(case)

    def test_timeout_holds_no_lease(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 2)
            lease = await _one(balancer, clock)
            with pytest.raises(WaitTimeout):
                await balancer.acquire(2, keys=[None, None], deadline=Deadline.after(clock, 0.2))
            assert await _in_flight(balancer) == {"r0": 1}
            await balancer.release([lease], SUCCESS)
            await balancer.acquire(2, keys=[None, None], deadline=Deadline.after(clock, 5.0))

        self.run(case)

    def test_cancelled_call_holds_no_lease(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1)
            lease = await _one(balancer, clock)
            waiting: asyncio.Task[object] = asyncio.create_task(_one(balancer, clock))
            await _waits(waiting, clock)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await balancer.release([lease], SUCCESS)
            await clock.sleep(0.05)
            assert await _in_flight(balancer) == {"r0": 0}

        self.run(case)

    def test_without_a_replica_that_may_serve_it_says_so_at_once(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self.balancer(clock)
            with pytest.raises(NoHealthyReplica):
                await _one(balancer, clock)
            await balancer.add("r0", capacity=1)
            await balancer.release([await _one(balancer, clock)], FAILURE)
            began = clock.now()
            with pytest.raises(NoHealthyReplica, match="r0"):
                await _one(balancer, clock)
            assert clock.now() - began < 1.0

        self.run(case)

    def test_waiting_call_ends_when_the_last_replica_fails(self) -> None:
        async def case(clock: Clock) -> None:
            for end in ("quarantine", "remove"):
                balancer = await self._with(clock, 1)
                lease = await _one(balancer, clock)
                waiting: asyncio.Task[object] = asyncio.create_task(_one(balancer, clock, limit_s=30.0))
                await _waits(waiting, clock)
                began = clock.now()
                if end == "quarantine":
                    await balancer.release([lease], FAILURE)
                else:
                    await balancer.remove("r0")
                with pytest.raises(NoHealthyReplica):
                    await waiting
                assert clock.now() - began < 5.0, f"{end}: it must not wait for its deadline"

        self.run(case)

    def test_dead_replica_is_no_black_hole(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 4, 4)
            failed = succeeded = 0
            while succeeded < 20:
                lease = await _one(balancer, clock)
                dead = lease.replica == "r0"
                await balancer.release([lease], FAILURE if dead else SUCCESS)
                failed, succeeded = failed + dead, succeeded + (not dead)
                assert failed <= 1, "a failed replica must get no further lease"
            assert (await _row(balancer, "r0")).state == "quarantined"

        self.run(case)

    def test_aborted_lease_leaves_the_replica_serving(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1)
            await balancer.release([await _one(balancer, clock)], ABORTED)
            assert (await _row(balancer, "r0")).state == "active"
            assert (await _one(balancer, clock)).replica == "r0"

        self.run(case)

    def test_repeated_release_changes_nothing(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 2)
            first, _ = [await _one(balancer, clock) for _ in range(2)]
            await balancer.release([first, first], SUCCESS)
            await balancer.release([first], FAILURE)
            row = await _row(balancer, "r0")
            assert (row.in_flight, row.state) == (1, "active")

        self.run(case)

    def test_late_release_after_return_of_the_replica_changes_nothing(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 2)
            old = await _one(balancer, clock)
            await balancer.remove("r0")
            await balancer.add("r0", capacity=2)
            new = await _one(balancer, clock)
            assert new.epoch > old.epoch
            await balancer.release([old], FAILURE)
            row = await _row(balancer, "r0")
            assert (row.in_flight, row.state, row.epoch) == (1, "active", new.epoch)

        self.run(case)

    def test_quarantined_replica_comes_back_by_add(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 2)
            lease = await _one(balancer, clock)
            await balancer.release([lease], FAILURE)
            await balancer.add("r0", capacity=2)
            again = await _one(balancer, clock)
            assert (again.replica, again.epoch > lease.epoch) == ("r0", True)

        self.run(case)

    def test_added_replica_serves_those_who_wait(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1)
            await _one(balancer, clock)
            waiting = asyncio.create_task(_one(balancer, clock))
            await clock.sleep(0.05)
            await balancer.add("r1", capacity=1)
            assert (await waiting).replica == "r1"

        self.run(case)

    def test_drain_waits_for_leases_and_grants_none(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 2)
            lease = await _one(balancer, clock)
            await balancer.add("r1", capacity=8)
            draining: asyncio.Task[object] = asyncio.create_task(
                balancer.drain("r0", deadline=Deadline.after(clock, 9.0))
            )
            await _waits(draining, clock)
            assert (await _row(balancer, "r0")).state == "draining"
            assert {(await _one(balancer, clock)).replica for _ in range(5)} == {"r1"}
            await balancer.release([lease], SUCCESS)
            await draining

        self.run(case)

    def test_drain_ends_at_its_deadline(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1)
            await _one(balancer, clock)
            with pytest.raises(WaitTimeout, match="r0"):
                await balancer.drain("r0", deadline=Deadline.after(clock, 0.2))

        self.run(case)

    def test_unknown_replica_is_removed_harmlessly(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self._with(clock, 1)
            await balancer.remove("nobody")
            assert [row.replica for row in await balancer.snapshot()] == ["r0"]

        self.run(case)

    def test_snapshot_is_in_order_of_addition(self) -> None:
        async def case(clock: Clock) -> None:
            balancer = await self.balancer(clock)
            for name in ("b", "a", "c"):
                await balancer.add(name, capacity=3)
            assert [(row.replica, row.capacity) for row in await balancer.snapshot()] == [("b", 3), ("a", 3), ("c", 3)]

        self.run(case)
