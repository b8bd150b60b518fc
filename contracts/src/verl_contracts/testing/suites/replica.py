# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of a `Replica`: nothing before weights, lengths that agree, and pauses that really pause."""

from __future__ import annotations

import abc
import asyncio
from typing import TYPE_CHECKING, ClassVar, cast

import pytest

from verl_contracts.clock import Deadline
from verl_contracts.errors import DataError, StateError, WaitTimeout
from verl_contracts.rollout import ASLEEP, INVALID, KEEP, LORA, PAUSED, SERVING, SLEEP
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest, SampleKey, SamplingParams
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import PauseMode, Replica, ReplicaStatus, SupportsLora, SupportsSleep

__all__ = ["ReplicaSuite", "check_completion"]


def check_completion(done: Completion | AbortedCompletion, *, max_tokens: int) -> None:
    """Check what must hold for every answer: one length, spans that cover it, and the budget."""
    count = len(done.token_ids)
    assert len(done.logprobs) == count
    assert count <= max_tokens
    assert all(value <= 1e-6 for value in done.logprobs), "log-probs are natural logarithms of probabilities"
    position = 0
    for span in done.spans:
        assert (span.start, span.start < span.end) == (position, True), f"spans must cover 0..{count}: {done.spans}"
        assert span.kv_version <= span.version
        position = span.end
    assert position == count, f"spans must cover 0..{count}: {done.spans}"


class ReplicaSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `opened` and `commit`."""

    long_tokens: ClassVar[int] = 400
    """Tokens of a generation that is surely under way when the test acts on it. The model must not stop by itself."""
    prompt_ids: ClassVar[tuple[int, ...]] = (1, 2, 3)
    reaction_s: ClassVar[float] = 20.0
    """Longest that any single operation may take here."""

    @abc.abstractmethod
    def opened(self, clock: Clock) -> AbstractAsyncContextManager[Replica]:
        """Start a replica that holds no weights, with a capacity of at least 2, and stop it in the end.

        It must answer `prompt_ids` with `long_tokens` tokens when it may.
        """

    @abc.abstractmethod
    def commit(self, replica: Replica, version: int, *, keep_cache: bool) -> Awaitable[None]:
        """Bring the weights of `version` to a paused or a fresh `replica`, through its receiver host."""

    def adapter_folder(self) -> str:
        """Return a folder with an adapter that fits. For replicas that claim `LORA`, which then must have this."""
        raise NotImplementedError("the replica claims LORA: write `adapter_folder` in the subclass of the suite")

    def _soon(self, clock: Clock) -> Deadline:
        return Deadline.after(clock, self.reaction_s)

    def _request(self, name: str, max_tokens: int, adapter: str | None = None) -> GenerationRequest:
        return GenerationRequest(
            request_id=name,
            prompt_ids=self.prompt_ids,
            sampling=SamplingParams(max_tokens=max_tokens),
            key=SampleKey(uid="0-0-0", sample=0, turn=0),
            adapter=adapter,
        )

    async def _status(self, replica: Replica, clock: Clock) -> ReplicaStatus:
        return await replica.status(deadline=self._soon(clock))

    async def _until(
        self, replica: Replica, clock: Clock, what: str, condition: Callable[[ReplicaStatus], bool]
    ) -> None:
        async def poll() -> None:
            while not condition(await self._status(replica, clock)):
                await clock.sleep(0.001)

        await bounded(poll(), subject=what, holder="replica", deadline=self._soon(clock), clock=clock)

    async def _sync(
        self, replica: Replica, clock: Clock, version: int, mode: PauseMode = "abort", *, keep_cache: bool = False
    ) -> None:
        await replica.pause(mode, deadline=self._soon(clock))
        await self.commit(replica, version, keep_cache=keep_cache)
        await replica.resume(deadline=self._soon(clock))

    def _start(
        self, replica: Replica, clock: Clock, name: str, max_tokens: int, adapter: str | None = None
    ) -> asyncio.Task[Completion | AbortedCompletion]:
        deadline = Deadline.after(clock, 4 * self.reaction_s)
        return asyncio.create_task(replica.generate(self._request(name, max_tokens, adapter), deadline=deadline))

    async def _running(
        self, replica: Replica, clock: Clock, name: str = "long", adapter: str | None = None
    ) -> asyncio.Task[Completion | AbortedCompletion]:
        before = (await self._status(replica, clock)).generated_tokens
        task = self._start(replica, clock, name, self.long_tokens, adapter)
        await self._until(replica, clock, "first tokens", lambda s: s.generated_tokens > before + 2)
        assert not task.done(), "long_tokens is too small: the generation ended before the test could act"
        return task

    def test_nothing_is_generated_before_weights(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                status = await self._status(replica, clock)
                assert (status.state, status.version) == (INVALID, None)
                with pytest.raises(StateError):
                    await replica.generate(self._request("early", 4), deadline=self._soon(clock))
                assert (await self._status(replica, clock)).generated_tokens == 0

        self.run(case)

    def test_answers_are_complete_after_weights(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 3)
                status = await self._status(replica, clock)
                assert (status.state, status.version, status.replica) == (SERVING, 3, replica.replica_id)
                for max_tokens in (1, 2, 9):
                    done = await replica.generate(
                        self._request(f"m{max_tokens}", max_tokens), deadline=self._soon(clock)
                    )
                    assert isinstance(done, Completion)
                    assert (done.request_id, done.replica) == (f"m{max_tokens}", replica.replica_id)
                    assert done.token_ids, "a completion is never empty"
                    check_completion(done, max_tokens=max_tokens)
                    assert {(span.version, span.kv_version) for span in done.spans} == {(3, 3)}
                    if len(done.token_ids) < max_tokens:
                        assert done.finish_reason == "stop"
                status = await self._status(replica, clock)
                assert status.prompt_tokens in (0, 3 * len(self.prompt_ids)), "each prompt counts once, or none does"
                assert 0 <= status.cached_prompt_tokens <= status.prompt_tokens

        self.run(case)

    def test_more_requests_than_capacity_all_end(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                tasks = [self._start(replica, clock, f"r{n}", 1 + n % 7) for n in range(3 * replica.capacity)]
                answers = await asyncio.gather(*tasks)
                assert [a.request_id for a in answers] == [f"r{n}" for n in range(3 * replica.capacity)]
                for number, answer in enumerate(answers):
                    assert isinstance(answer, Completion)
                    check_completion(answer, max_tokens=1 + number % 7)
                status = await self._status(replica, clock)
                assert (status.running, status.waiting) == (0, 0)

        self.run(case)

    def test_aborted_request_is_of_the_other_type(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                task, other = await self._running(replica, clock), self._start(replica, clock, "other", 3)
                await replica.abort(["long", "unknown"], deadline=self._soon(clock))
                done = await task
                assert isinstance(done, AbortedCompletion)
                assert done.reason
                assert len(done.token_ids) < self.long_tokens
                check_completion(done, max_tokens=self.long_tokens)
                assert isinstance(await other, Completion), "only what was named is cut"
                await replica.abort(None, deadline=self._soon(clock))

        self.run(case)

    def test_abort_without_names_cuts_everything(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                tasks = [await self._running(replica, clock, f"long{n}") for n in range(2)]
                await replica.abort(None, deadline=self._soon(clock))
                assert all(isinstance(done, AbortedCompletion) for done in await asyncio.gather(*tasks))

        self.run(case)

    def test_pause_abort_cuts_what_runs_and_later_requests_wait(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                task = await self._running(replica, clock)
                await replica.pause("abort", deadline=self._soon(clock))
                assert isinstance(await task, AbortedCompletion)
                await replica.pause("abort", deadline=self._soon(clock))
                status = await self._status(replica, clock)
                assert (status.state, status.running) == (PAUSED, 0)
                late = self._start(replica, clock, "late", 2)
                await clock.sleep(0.2)
                assert not late.done(), "nothing is decoded while paused"
                assert (await self._status(replica, clock)).generated_tokens == status.generated_tokens
                await replica.resume(deadline=self._soon(clock))
                await replica.resume(deadline=self._soon(clock))
                assert isinstance(await late, Completion)

        self.run(case)

    def test_pause_wait_finishes_what_runs(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                task = await self._running(replica, clock)
                await replica.pause("wait", deadline=Deadline.after(clock, 4 * self.reaction_s))
                assert task.done() or isinstance(await task, Completion)
                assert isinstance(task.result(), Completion)
                assert (await self._status(replica, clock)).state == PAUSED
                await replica.resume(deadline=self._soon(clock))

        self.run(case)

    def test_pause_keep_continues_with_both_versions_in_the_spans(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                if KEEP not in replica.capabilities:
                    pytest.skip("the replica does not claim to keep sequences over a sync")
                await self._sync(replica, clock, 1)
                task = await self._running(replica, clock)
                await self._sync(replica, clock, 2, "keep", keep_cache=True)
                done = await task
                assert isinstance(done, Completion)
                check_completion(done, max_tokens=self.long_tokens)
                assert [(span.version, span.kv_version) for span in done.spans] == [(1, 1), (2, 1)]

        self.run(case)

    def test_new_weights_show_in_the_spans(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                for version in (1, 2, 7):
                    await self._sync(replica, clock, version)
                    done = await replica.generate(self._request("r", 3), deadline=self._soon(clock))
                    assert {(span.version, span.kv_version) for span in done.spans} == {(version, version)}

        self.run(case)

    def test_request_ends_at_its_deadline_and_frees_its_place(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                await replica.pause("abort", deadline=self._soon(clock))
                with pytest.raises(WaitTimeout):
                    await replica.generate(self._request("r", 3), deadline=Deadline.after(clock, 0.2))
                await replica.resume(deadline=self._soon(clock))
                await self._until(replica, clock, "idle", lambda s: (s.running, s.waiting) == (0, 0))
                assert isinstance(
                    await replica.generate(self._request("r", 3), deadline=self._soon(clock)), Completion
                ), "its name may be used again"

        self.run(case)

    def test_cancelled_request_frees_its_place(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                task = await self._running(replica, clock)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self._until(replica, clock, "idle", lambda s: (s.running, s.waiting) == (0, 0))

        self.run(case)

    def test_sleeping_replica_holds_nothing_until_a_full_sync(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                if SLEEP not in replica.capabilities:
                    pytest.skip("the replica does not claim to sleep")
                sleeper = cast("SupportsSleep", replica)
                await self._sync(replica, clock, 1)
                with pytest.raises(StateError):
                    await sleeper.sleep(deadline=self._soon(clock))
                await replica.pause("abort", deadline=self._soon(clock))
                for _ in range(2):
                    await sleeper.sleep(deadline=self._soon(clock))
                status = await self._status(replica, clock)
                assert (status.state, status.version) == (ASLEEP, None)
                with pytest.raises(StateError):
                    await replica.resume(deadline=self._soon(clock))
                with pytest.raises(StateError):
                    await replica.generate(self._request("r", 3), deadline=self._soon(clock))
                for _ in range(2):
                    await sleeper.wake(deadline=self._soon(clock))
                assert (await self._status(replica, clock)).state == INVALID
                await self.commit(replica, 2, keep_cache=False)
                await replica.resume(deadline=self._soon(clock))
                done = await replica.generate(self._request("r", 3), deadline=self._soon(clock))
                assert {span.version for span in done.spans} == {2}

        self.run(case)

    def test_request_for_an_adapter_that_is_not_there_is_refused(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                await self._sync(replica, clock, 1)
                before = (await self._status(replica, clock)).generated_tokens
                with pytest.raises(DataError) as caught:
                    await replica.generate(self._request("r", 3, "nowhere"), deadline=self._soon(clock))
                assert "nowhere" in str(caught.value), "the refusal must name the adapter"
                assert "\n" not in str(caught.value)
                status = await self._status(replica, clock)
                assert (status.running, status.waiting, status.generated_tokens) == (0, 0, before)
                done = await replica.generate(self._request("r", 3), deadline=self._soon(clock))
                assert isinstance(done, Completion), "the policy itself still answers"

        self.run(case)

    def test_adapter_answers_until_it_is_unloaded(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.opened(clock) as replica:
                if LORA not in replica.capabilities:
                    pytest.skip("the replica does not claim to take adapters")
                adapting, folder = cast("SupportsLora", replica), self.adapter_folder()

                async def names() -> tuple[str, ...]:
                    return tuple(await adapting.adapters(deadline=self._soon(clock)))

                await self._sync(replica, clock, 1)
                with pytest.raises(DataError):
                    await adapting.load_adapter("a", folder=f"{folder}/nowhere", deadline=self._soon(clock))
                await adapting.unload_adapter("a", deadline=self._soon(clock))
                assert await names() == ()
                for _ in range(2):
                    await adapting.load_adapter("a", folder=folder, deadline=self._soon(clock))
                    assert await names() == ("a",)
                for version in (1, 2):
                    done = await replica.generate(self._request("r", 3, "a"), deadline=self._soon(clock))
                    assert isinstance(done, Completion)
                    assert {span.version for span in done.spans} == {version}
                    await self._sync(replica, clock, version + 1)
                    assert await names() == ("a",), "an adapter outlives a sync"
                task = await self._running(replica, clock, adapter="a")
                with pytest.raises(WaitTimeout):
                    await adapting.unload_adapter("a", deadline=Deadline.after(clock, 0.01))
                assert await names() == ("a",), "an unload that was given up leaves it loaded"
                await replica.abort(["long"], deadline=self._soon(clock))
                assert isinstance(await task, AbortedCompletion)
                for _ in range(2):
                    await adapting.unload_adapter("a", deadline=self._soon(clock))
                    assert await names() == ()
                with pytest.raises(DataError):
                    await replica.generate(self._request("r", 3, "a"), deadline=self._soon(clock))

        self.run(case)
