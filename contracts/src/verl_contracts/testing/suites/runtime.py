# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of a `Runtime`: calls, limits, deaths, placement, and that `close` leaves nothing."""

from __future__ import annotations

import abc
import asyncio
import pickle
from typing import TYPE_CHECKING, ClassVar

import pytest

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, ResourcesError, StateError, VerlError, WaitTimeout, WeightSyncError
from verl_contracts.runtime import ActorRef, ActorSpec, Bundle, ObjectSpec, PayloadRef, PlacementRequest
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextlib import AbstractAsyncContextManager

    from verl_contracts.clock import Clock
    from verl_contracts.failures import FailureRecord
    from verl_contracts.runtime import Runtime

__all__ = ["RuntimeSuite"]

_PROBE = "verl_contracts.testing.actors:Probe"
_BROKEN = "verl_contracts.testing.actors:Broken"


def _spec(role: str = "probe", rank: int = 0, **arguments: object) -> ActorSpec:
    return ActorSpec(role=role, rank=rank, target=ObjectSpec(path=_PROBE, arguments=arguments))


class RuntimeSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `opened`."""

    processes: ClassVar[bool] = True
    """Whether actors have processes of their own, which can crash, and threads for plain methods."""
    spawn_limit_s: ClassVar[float] = 30.0
    notice_limit_s: ClassVar[float] = 10.0
    """Longest until a crash must be on the failure channel."""

    @abc.abstractmethod
    def opened(self, clock: Clock) -> AbstractAsyncContextManager[Runtime]:
        """Create a fresh runtime with at least 2 CPUs, and close it in the end."""

    async def _spawn(self, runtime: Runtime, spec: ActorSpec | None = None) -> ActorRef:
        return await runtime.spawn(spec or _spec(), deadline=self._soon(runtime))

    def _soon(self, runtime: Runtime) -> Deadline:
        return Deadline.after(runtime.clock, self.spawn_limit_s)

    async def _call(self, runtime: Runtime, actor: ActorRef, method: str, **arguments: object) -> object:
        return await runtime.call(actor, method, arguments, deadline=self._soon(runtime))

    def test_object_is_built_with_context_and_arguments(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime, _spec("judge", 3, tag="t"))
                assert (actor.role, actor.rank) == ("judge", 3)
                assert await self._call(runtime, actor, "identity") == (runtime.run_id, "judge", 3, "t")

        self.run(case)

    def test_values_come_back_unchanged(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                for value in (None, 0, "", (1, ("a", 2.5)), {"k": [1]}, b"\0" * 300_000):
                    assert await self._call(runtime, actor, "echo", value=value) == value
                    assert await self._call(runtime, actor, "plain", value=value) == value

        self.run(case)

    def test_async_methods_run_at_once(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                calls = [self._call(runtime, actor, "meet", parties=64) for _ in range(64)]
                assert max([int(str(n)) for n in await asyncio.gather(*calls)]) == 64

        self.run(case)

    def test_plain_methods_run_one_at_a_time(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                calls = [self._call(runtime, actor, "plain_busy", seconds=0.01) for _ in range(5)]
                assert set(await asyncio.gather(*calls)) == {1}

        self.run(case)

    def test_long_call_does_not_delay_a_short_one(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                long = await self._hang(runtime, actor)
                assert await self._call(runtime, actor, "echo", value=1) == 1
                assert not long.done()
                long.cancel()
                await _cancelled(long)

        self.run(case)

    def test_call_ends_at_its_deadline(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                began = clock.now()
                with pytest.raises(WaitTimeout) as caught:
                    await runtime.call(actor, "hang", {}, deadline=Deadline.after(runtime.clock, 0.2))
                assert clock.now() - began < 5.0
                assert "hang" in str(caught.value), "a timeout must name what was awaited"
                assert await self._call(runtime, actor, "echo", value=1) == 1

        self.run(case)

    def test_method_with_deadline_receives_it(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                answer = await runtime.call(actor, "left", {}, deadline=Deadline.after(runtime.clock, 20.0))
                assert isinstance(answer, tuple)
                remaining, limit = answer
                assert 5.0 < remaining <= 20.0, "rebased onto the actor's clock"
                assert limit == pytest.approx(20.0, abs=1.0)

        self.run(case)

    def test_error_of_a_method_arrives_as_it_was(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                for method in ("fail", "plain_fail"):
                    with pytest.raises(KeyError, match="lost"):
                        await self._call(runtime, actor, method, error=KeyError("lost"))
                    sync = WeightSyncError("transfer", "cut", "w", ("r1",))
                    with pytest.raises(WeightSyncError) as caught:
                        await self._call(runtime, actor, method, error=sync)
                    assert (caught.value.phase, caught.value.tensor, caught.value.missing) == ("transfer", "w", ("r1",))
                assert await self._call(runtime, actor, "echo", value=1) == 1, "an error must not kill the actor"

        self.run(case)

    def test_unknown_method_is_an_error(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                with pytest.raises(Exception, match="no_such_method"):
                    await self._call(runtime, actor, "no_such_method")

        self.run(case)

    def test_cancelled_call_is_cancelled_at_the_actor(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                call = await self._hang(runtime, actor)
                call.cancel()
                await _cancelled(call)
                await self._until(runtime, self._count_is(runtime, actor, "cancelled", 1))

        self.run(case)

    async def _hang(self, runtime: Runtime, actor: ActorRef) -> asyncio.Task[object]:
        """Start a call that ends only when it is cancelled, and return once it is inside."""
        call = asyncio.create_task(self._call(runtime, actor, "hang"))
        await self._until(runtime, self._count_is(runtime, actor, "hanging", 1))
        return call

    async def _count_is(self, runtime: Runtime, actor: ActorRef, method: str, count: int) -> None:
        while await self._call(runtime, actor, method) != count:
            await runtime.clock.sleep(0.01)

    async def _until(self, runtime: Runtime, condition: Coroutine[object, object, None]) -> None:
        deadline = Deadline.after(runtime.clock, self.notice_limit_s)
        await bounded(condition, subject="condition", holder="the runtime", deadline=deadline, clock=runtime.clock)

    def test_constructor_error_is_the_cause(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                spec = ActorSpec(role="b", rank=1, target=ObjectSpec(path=_BROKEN, arguments={"message": "no model"}))
                with pytest.raises(ActorFailed, match="no model") as caught:
                    await self._spawn(runtime, spec)
                record = caught.value.record
                assert (record.role, record.rank) == ("b", 1)
                assert record.cause.startswith("LookupError"), "the first cause, not a wrapper's"
                again = ActorSpec(role="b", rank=1, target=ObjectSpec(path=_PROBE))
                assert await self._call(runtime, await self._spawn(runtime, again), "echo", value=1) == 1

        self.run(case)

    def test_class_that_does_not_exist_is_named(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                spec = ActorSpec(role="b", rank=0, target=ObjectSpec(path="verl_contracts.testing.actors:Nowhere"))
                with pytest.raises(VerlError, match="Nowhere"):
                    await self._spawn(runtime, spec)

        self.run(case)

    def test_kill_ends_pending_and_later_calls(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                pending = await self._hang(runtime, actor)
                await runtime.kill(actor, deadline=self._soon(runtime))
                with pytest.raises(ActorFailed):
                    await pending
                with pytest.raises(ActorFailed):
                    await self._call(runtime, actor, "echo", value=1)
                await runtime.kill(actor, deadline=self._soon(runtime))

        self.run(case)

    def test_role_and_rank_can_be_used_again_after_a_kill(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                first = await self._spawn(runtime)
                await runtime.kill(first, deadline=self._soon(runtime))
                second = await self._spawn(runtime)
                assert await self._call(runtime, second, "echo", value=2) == 2
                with pytest.raises(ActorFailed):
                    await self._call(runtime, first, "echo", value=1)

        self.run(case)

    def test_reported_failure_reaches_the_watcher_once(self) -> None:
        async def case(clock: Clock) -> None:
            seen: list[FailureRecord] = []
            async with self.opened(clock) as runtime:
                watcher = asyncio.create_task(_collect(runtime, seen))
                actor = await self._spawn(runtime, _spec("judge", 2))
                await self._call(runtime, actor, "report", cause="ValueError: one bad row")
                await self._until(runtime, _filled(runtime, seen, 1))
                assert await self._call(runtime, actor, "echo", value=1) == 1
                await runtime.close(deadline=self._soon(runtime))
                await self._until(runtime, _done(watcher))
            assert [(r.role, r.rank, r.cause) for r in seen] == [("judge", 2, "ValueError: one bad row")]

        self.run(case)

    def test_kill_is_not_reported_as_a_failure(self) -> None:
        async def case(clock: Clock) -> None:
            seen: list[FailureRecord] = []
            async with self.opened(clock) as runtime:
                watcher = asyncio.create_task(_collect(runtime, seen))
                await runtime.kill(await self._spawn(runtime), deadline=self._soon(runtime))
                await runtime.close(deadline=self._soon(runtime))
                await self._until(runtime, _done(watcher))
            assert seen == []

        self.run(case)

    def test_crash_ends_calls_and_is_reported(self) -> None:
        if not self.processes:
            pytest.skip("actors live in this process and cannot crash alone")

        async def case(clock: Clock) -> None:
            seen: list[FailureRecord] = []
            async with self.opened(clock) as runtime:
                watcher = asyncio.create_task(_collect(runtime, seen))
                actor = await self._spawn(runtime, _spec("worker", 5))
                pending = await self._hang(runtime, actor)
                with pytest.raises(ActorFailed) as caught:
                    await self._call(runtime, actor, "crash")
                assert (caught.value.record.role, caught.value.record.rank) == ("worker", 5)
                with pytest.raises(ActorFailed):
                    await pending
                await self._until(runtime, _filled(runtime, seen, 1))
                await runtime.close(deadline=self._soon(runtime))
                await self._until(runtime, _done(watcher))
            assert [(r.role, r.rank) for r in seen] == [("worker", 5)]
            assert len(seen[0].lines) <= 30

        self.run(case)

    def test_actors_call_each_other(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                one, two = await self._spawn(runtime), await self._spawn(runtime, _spec("probe", 1))
                copied = pickle.loads(pickle.dumps(two))
                assert await self._call(runtime, one, "ask", other=copied, value=7) == 7

        self.run(case)

    def test_payloads_of_any_size_are_got_where_they_are_needed(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                for size in (0, 10, 1_000_000):
                    for ref in (await self._call(runtime, actor, "put", size=size), await runtime.put(bytes(size))):
                        assert isinstance(ref, PayloadRef)
                        assert await runtime.get(ref, deadline=self._soon(runtime)) == bytes(size)

        self.run(case)

    def test_actor_runs_on_a_grant_and_devices_come_back(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                for _ in range(3):  # were they not given back, the third would not fit
                    request = PlacementRequest(pool="p", bundles=(Bundle(cpus=1.0), Bundle(cpus=1.0)))
                    grant = await runtime.place(request, deadline=self._soon(runtime))
                    assert grant.bundles == request.bundles
                    spec = ActorSpec(role="w", rank=0, target=ObjectSpec(path=_PROBE), grant=grant, bundle=1)
                    actor = await self._spawn(runtime, spec)
                    assert await self._call(runtime, actor, "echo", value=1) == 1
                    await runtime.kill(actor, deadline=self._soon(runtime))
                    await runtime.release(grant)
                    await runtime.release(grant)

        self.run(case)

    def test_too_much_is_refused_naming_it_and_leaves_nothing(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                huge = PlacementRequest(pool="huge", bundles=(Bundle(cpus=100_000.0),))
                with pytest.raises(ResourcesError, match="100000"):
                    await runtime.place(huge, deadline=self._soon(runtime))
                fits = PlacementRequest(pool="fits", bundles=(Bundle(cpus=1.0), Bundle(cpus=1.0)))
                await runtime.release(await runtime.place(fits, deadline=self._soon(runtime)))

        self.run(case)

    def test_close_ends_everything_and_may_be_repeated(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as runtime:
                actor = await self._spawn(runtime)
                pending = await self._hang(runtime, actor)
                await runtime.close(deadline=self._soon(runtime))
                with pytest.raises((ActorFailed, StateError)):
                    await pending
                await runtime.close(deadline=self._soon(runtime))
                with pytest.raises((ActorFailed, StateError)):
                    await self._call(runtime, actor, "echo", value=1)
                with pytest.raises(VerlError):
                    await self._spawn(runtime)

        self.run(case)


async def _cancelled(task: asyncio.Task[object]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


async def _collect(runtime: Runtime, seen: list[FailureRecord]) -> None:
    async for record in runtime.watch():
        seen.append(record)


async def _filled(runtime: Runtime, seen: list[FailureRecord], count: int) -> None:
    while len(seen) < count:
        await runtime.clock.sleep(0.01)


async def _done(task: asyncio.Task[None]) -> None:
    await task
