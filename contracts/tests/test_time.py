"""Deadlines, bounded waits and the watchdog, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import WaitTimeout
from verl_contracts.testing.virtual import VirtualClock, run_virtual
from verl_contracts.waits import Wait, Waits, bounded, watch_waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


def virtually(case: Callable[[VirtualClock], Awaitable[T]]) -> T:
    async def main() -> T:
        return await case(VirtualClock(asyncio.get_running_loop()))

    return run_virtual(main())


def test_deadline_counts_down_and_stops_at_zero() -> None:
    async def case(clock: VirtualClock) -> None:
        deadline = Deadline.after(clock, 100.0)
        await clock.sleep(60.0)
        assert deadline.remaining(clock) == pytest.approx(40.0)
        assert deadline.within(clock, 10.0).remaining(clock) == pytest.approx(10.0)
        assert deadline.within(clock, 1000.0) is deadline
        await clock.sleep(60.0)
        assert deadline.remaining(clock) == 0.0
        assert deadline.limit_s == 100.0

    virtually(case)


def test_hours_pass_at_once_in_virtual_time() -> None:
    before = SystemClock().now()

    async def case(clock: VirtualClock) -> float:
        await clock.sleep(36_000.0)
        return clock.now()

    assert virtually(case) == pytest.approx(36_000.0)
    assert SystemClock().now() - before < 5.0


def test_deadlock_is_found_at_once_in_virtual_time() -> None:
    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(asyncio.Event().wait())


def test_bounded_wait_returns_the_value_when_it_comes_in_time() -> None:
    async def case(clock: VirtualClock) -> None:
        waits = Waits()

        async def late() -> int:
            await clock.sleep(9.0)
            return 7

        deadline = Deadline.after(clock, 10.0)
        assert await bounded(late(), subject="s", holder="h", deadline=deadline, clock=clock, waits=waits) == 7
        assert waits.current() == ()

    virtually(case)


def test_bounded_wait_raises_and_cancels_at_the_deadline() -> None:
    async def case(clock: VirtualClock) -> None:
        cancelled = asyncio.Event()

        async def never() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        missing = ["r1", "r2"]
        with pytest.raises(WaitTimeout) as caught:
            await bounded(
                never(),
                subject="join",
                holder=lambda: ", ".join(missing),
                deadline=Deadline.after(clock, 3.0),
                clock=clock,
            )
        assert str(caught.value) == "waited 3 s for join, held by r1, r2"
        assert clock.now() == pytest.approx(3.0)
        assert cancelled.is_set()

    virtually(case)


def test_a_wait_that_runs_out_names_the_setting_of_its_limit() -> None:
    async def case(clock: VirtualClock) -> None:
        whole = Deadline.after(clock, 100.0, setting="trainer.step_limit_s")
        part = whole.within(clock, 1.0, setting="reward.limit_s")
        assert part.within(clock, 50.0, setting="other") is part
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(WaitTimeout, match=r"held by nobody; the limit is reward\.limit_s$") as caught:
            await bounded(never, subject="it", holder="nobody", deadline=part, clock=clock)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.setting) == (str(caught.value), "reward.limit_s")

    virtually(case)


def test_expired_deadline_raises_at_once() -> None:
    async def case(clock: VirtualClock) -> None:
        deadline = Deadline.after(clock, 1.0)
        await clock.sleep(5.0)
        with pytest.raises(WaitTimeout):
            await bounded(clock.sleep(1.0), subject="s", holder="h", deadline=deadline, clock=clock)
        assert clock.now() == pytest.approx(5.0)

    virtually(case)


def test_inner_timeout_passes_through_unchanged() -> None:
    async def case(clock: VirtualClock) -> None:
        async def impatient() -> None:
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError) as caught:
            await bounded(impatient(), subject="s", holder="h", deadline=Deadline.after(clock, 9.0), clock=clock)
        assert not isinstance(caught.value, WaitTimeout)

    virtually(case)


def test_cancellation_passes_through_and_unlists() -> None:
    async def case(clock: VirtualClock) -> None:
        waits = Waits()
        task = asyncio.create_task(
            bounded(
                clock.sleep(50.0),
                subject="s",
                holder="h",
                deadline=Deadline.after(clock, 99.0),
                clock=clock,
                waits=waits,
            )
        )
        await clock.sleep(1.0)
        assert len(waits.current()) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waits.current() == ()

    virtually(case)


def test_waits_are_listed_oldest_first() -> None:
    async def case(clock: VirtualClock) -> None:
        waits = Waits()

        def wait(subject: str, holder: str | Callable[[], str], limit_s: float) -> asyncio.Task[None]:
            deadline = Deadline.after(clock, limit_s)
            return asyncio.create_task(
                bounded(clock.sleep(3.0), subject=subject, holder=holder, deadline=deadline, clock=clock, waits=waits)
            )

        old = wait("old", lambda: "a", 6.0)
        await clock.sleep(1.0)
        new = wait("new", "b", 5.0)
        await clock.sleep(1.0)
        assert waits.current() == (
            Wait(subject="old", holder="a", since=0.0, limit_s=6.0),
            Wait(subject="new", holder="b", since=1.0, limit_s=5.0),
        )
        await asyncio.gather(old, new)
        assert waits.current() == ()

    virtually(case)


@given(waits=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 20)), max_size=12))
def test_each_of_many_waits_ends_at_its_own_limit(waits: list[tuple[int, int, int]]) -> None:
    """(begin, length, limit) each; equal length and limit are left out, for either may come first."""

    async def case(clock: VirtualClock) -> None:
        async def one(begin: int, length: int, limit_s: int) -> None:
            await clock.sleep(begin)
            deadline = Deadline.after(clock, limit_s)
            try:
                await bounded(clock.sleep(length), subject="s", holder="h", deadline=deadline, clock=clock)
            except WaitTimeout:
                assert limit_s < length
            else:
                assert length < limit_s
            assert clock.now() == pytest.approx(begin + min(length, limit_s))

        await asyncio.gather(*(one(*row) for row in waits if row[1] != row[2]))

    virtually(case)


def test_an_outer_limit_and_a_cancellation_are_told_apart() -> None:
    async def case(clock: VirtualClock) -> None:
        async def inner() -> None:
            await bounded(
                clock.sleep(9.0), subject="inner", holder="h", deadline=Deadline.after(clock, 5.0), clock=clock
            )

        with pytest.raises(WaitTimeout, match="outer"):
            await bounded(inner(), subject="outer", holder="h", deadline=Deadline.after(clock, 5.0), clock=clock)
        task = asyncio.create_task(inner())
        clock_loop = asyncio.get_running_loop()
        clock_loop.call_at(clock.now() + 5.0, task.cancel)  # in the very tick in which the limit is reached
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    virtually(case)


def test_an_awaitable_that_heeds_no_cancelling_keeps_its_result() -> None:
    async def case(clock: VirtualClock) -> None:
        async def stubborn() -> int:
            try:
                await clock.sleep(9.0)
            except asyncio.CancelledError:
                return 7
            return 8

        got = await bounded(stubborn(), subject="s", holder="h", deadline=Deadline.after(clock, 1.0), clock=clock)
        task = asyncio.current_task()
        assert got == 7
        assert task is not None
        assert task.cancelling() == 0

    virtually(case)


@pytest.mark.parametrize(("limit_s", "level"), [(60.0, logging.INFO), (20.0, logging.WARNING)])
def test_watchdog_names_old_waits_only_and_warns_of_the_half_over(
    caplog: pytest.LogCaptureFixture, limit_s: float, level: int
) -> None:
    async def case(clock: VirtualClock) -> None:
        waits = Waits()
        watchdog = asyncio.create_task(watch_waits(clock=clock, older_than_s=10.0, every_s=5.0, waits=waits))
        wait = asyncio.create_task(
            bounded(
                clock.sleep(11.0),
                subject="weights",
                holder="replica 2",
                deadline=Deadline.after(clock, limit_s),
                clock=clock,
                waits=waits,
            )
        )
        await clock.sleep(9.0)
        assert caplog.messages == []
        await wait
        await clock.sleep(30.0)
        watchdog.cancel()
        await asyncio.gather(watchdog, return_exceptions=True)

    with caplog.at_level(logging.INFO):
        virtually(case)
    assert [(row.levelno, row.getMessage()) for row in caplog.records] == [
        (level, f"waiting 10 s of {limit_s:.0f} s for weights, held by replica 2")
    ]


def test_watchdog_tells_of_many_alike_once_and_again_when_they_are_twice_as_old(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def case(clock: VirtualClock) -> None:
        waits = Waits()
        watchdog = asyncio.create_task(watch_waits(clock=clock, older_than_s=10.0, every_s=5.0, waits=waits))
        subjects = [f"agent[{number}].run_group" for number in range(5)] + ["policy.update"]
        groups = [
            asyncio.create_task(
                bounded(
                    clock.sleep(50.0),
                    subject=subject,
                    holder="it",
                    deadline=Deadline.after(clock, 200.0),
                    clock=clock,
                    waits=waits,
                )
            )
            for subject in subjects
        ]
        await asyncio.gather(*groups)
        await clock.sleep(20.0)
        watchdog.cancel()
        await asyncio.gather(watchdog, return_exceptions=True)

    with caplog.at_level(logging.INFO):
        virtually(case)
    told = [message.removeprefix("waiting ").replace(" s of 200 s for", "") for message in caplog.messages]
    assert told == [
        text
        for age in (10, 20, 40)
        for text in (f"{age} agent[0].run_group, held by it, and 4 more like it", f"{age} policy.update, held by it")
    ]
