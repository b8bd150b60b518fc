# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of an `LLMServerManager`: who may serve when, and that replicas come and go without a trace."""

from __future__ import annotations

import abc
import asyncio
import pickle
from typing import TYPE_CHECKING, ClassVar

import pytest

from verl_contracts.clock import Deadline
from verl_contracts.errors import NoHealthyReplica, VerlError
from verl_contracts.plugins import find_class
from verl_contracts.rollout import INVALID, SERVING
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.testing.suites.replica import check_completion
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from contextlib import AbstractAsyncContextManager

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import LLMServerManager, Replica

__all__ = ["LLMServerManagerSuite"]


class LLMServerManagerSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `created` and `commit`."""

    prompt_ids: ClassVar[tuple[int, ...]] = (1, 2, 3)
    reaction_s: ClassVar[float] = 30.0
    """Longest that any single operation may take here."""

    @abc.abstractmethod
    def created(
        self, clock: Clock, *, num_replicas: int, start_rank: int | None = None
    ) -> AbstractAsyncContextManager[LLMServerManager]:
        """Create a manager without a grant, and close it in the end. There must be room for one replica more."""

    @abc.abstractmethod
    def commit(self, replica: Replica, version: int) -> Awaitable[None]:
        """Bring the weights of `version` to a paused or fresh `replica`, through its receiver host."""

    def _soon(self, clock: Clock) -> Deadline:
        return Deadline.after(clock, self.reaction_s)

    def _request(self, name: str, sample: int = 0) -> GenerationRequest:
        return GenerationRequest(
            request_id=name,
            prompt_ids=self.prompt_ids,
            sampling=SamplingParams(max_tokens=4),
            key=SampleKey(uid="0-0-0", sample=sample, turn=0),
        )

    async def _bring_up(self, manager: LLMServerManager, clock: Clock, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            await replica.pause("abort", deadline=self._soon(clock))
            await self.commit(replica, 1)
            await replica.resume(deadline=self._soon(clock))
        await manager.admit([replica.replica_id for replica in replicas])

    async def _served_by(self, manager: LLMServerManager, clock: Clock, count: int) -> set[str]:
        client = manager.client()
        answers = await asyncio.gather(
            *(client.generate(self._request(f"q{n}", n), deadline=self._soon(clock)) for n in range(count))
        )
        for done in answers:
            assert isinstance(done, Completion)
            check_completion(done, max_tokens=4)
        return {done.replica for done in answers}

    def test_new_replicas_are_invalid_and_nothing_is_served(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=2) as manager:
                replicas = manager.replicas()
                assert len(replicas) == 2
                assert len({replica.replica_id for replica in replicas}) == 2
                for replica in replicas:
                    assert (await replica.status(deadline=self._soon(clock))).state == INVALID
                with pytest.raises(VerlError):
                    await manager.client().generate(self._request("early"), deadline=Deadline.after(clock, 2.0))
                for replica in replicas:
                    assert (await replica.status(deadline=self._soon(clock))).generated_tokens == 0

        self.run(case)

    def test_admitted_replicas_share_the_requests(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=2) as manager:
                await self._bring_up(manager, clock, manager.replicas())
                names = {replica.replica_id for replica in manager.replicas()}
                await manager.admit(sorted(names))
                assert await self._served_by(manager, clock, 8) == names
                for replica in manager.replicas():
                    assert (await replica.status(deadline=self._soon(clock))).state == SERVING

        self.run(case)

    def test_excluded_replica_serves_no_more_and_lives(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=2) as manager:
                one, two = manager.replicas()
                await self._bring_up(manager, clock, [one, two])
                for _ in range(2):
                    await manager.exclude([one.replica_id])
                assert await self._served_by(manager, clock, 6) == {two.replica_id}
                assert (await one.status(deadline=self._soon(clock))).state == SERVING
                await manager.admit([one.replica_id])
                assert one.replica_id in await self._served_by(manager, clock, 8)

        self.run(case)

    def test_without_admitted_replicas_the_client_says_so_in_time(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=1) as manager:
                await self._bring_up(manager, clock, manager.replicas())
                await manager.exclude([manager.replicas()[0].replica_id])
                with pytest.raises((NoHealthyReplica, TimeoutError)):
                    await manager.client().generate(self._request("r"), deadline=Deadline.after(clock, 1.0))

        self.run(case)

    def test_added_replica_joins_and_a_removed_one_is_gone(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=1) as manager:
                (first,) = manager.replicas()
                await self._bring_up(manager, clock, [first])
                (second,) = await manager.add(1, deadline=self._soon(clock))
                assert [r.replica_id for r in manager.replicas()] == [first.replica_id, second.replica_id]
                assert (await second.status(deadline=self._soon(clock))).state == INVALID
                assert await self._served_by(manager, clock, 4) == {first.replica_id}, "not before its first sync"
                await self._bring_up(manager, clock, [second])
                assert second.replica_id in await self._served_by(manager, clock, 8)
                await manager.remove([first.replica_id], deadline=self._soon(clock))
                assert [r.replica_id for r in manager.replicas()] == [second.replica_id]
                assert await self._served_by(manager, clock, 4) == {second.replica_id}

        self.run(case)

    def test_start_rank_gives_other_names(self) -> None:
        async def case(clock: Clock) -> None:
            names: list[str] = []
            for start_rank in (None, 0, 5):
                async with self.created(clock, num_replicas=1, start_rank=start_rank) as manager:
                    names.append(manager.replicas()[0].replica_id)
            assert names[0] == names[1] != names[2], f"None counts from 0: {names}"

        self.run(case)

    def test_client_can_be_built_elsewhere(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=1) as manager:
                spec = pickle.loads(pickle.dumps(manager.client_spec()))
                built = find_class(spec.path, key="client_spec")
                assert asyncio.iscoroutinefunction(vars(built).get("generate") or getattr(built, "generate", None))
                assert len(manager.addresses()) <= len(manager.replicas())

        self.run(case)

    def test_close_may_be_repeated(self) -> None:
        async def case(clock: Clock) -> None:
            async with self.created(clock, num_replicas=1) as manager:
                for _ in range(2):
                    await manager.close(deadline=self._soon(clock))

        self.run(case)
