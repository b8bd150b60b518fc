"""The kit's suites against this package: replicas, their manager, and agent loops, through real actors and proxies."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from service_fakes import World, settings, world

from verl_contracts.agents import AgentSettings
from verl_contracts.clock import Deadline
from verl_contracts.testing.suites.agents import AgentLoopManagerSuite
from verl_contracts.testing.suites.manager import LLMServerManagerSuite
from verl_contracts.testing.suites.replica import ReplicaSuite
from verl_contracts.weights import Manifest, Plan
from verl_rollout.agents.manager import WorkerAgentLoopManager
from verl_rollout.manager import ReplicaManager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.agents import AgentLoopManager
    from verl_contracts.clock import Clock
    from verl_contracts.rollout import LLMServerManager, Replica
    from verl_contracts.runtime import Caller, ObjectSpec

_sessions = itertools.count()


async def _commit(here: World, replica: Replica, version: int, *, keep_cache: bool) -> None:
    """Move nothing, as the scripted backend does, through all phases of the receiver host."""
    host, limit = replica.receiver_host, here.within(30.0)
    manifest = Manifest(version=version, tensors=(), num_bytes=0)
    session = f"s{next(_sessions)}"
    endpoints = tuple(await host.prepare(manifest, session=session, deadline=limit))
    plan = Plan(session=session, version=version, manifest=manifest, senders=(), receivers=endpoints, bucket_bytes=1)
    await host.transfer(plan, deadline=limit)
    await host.commit(version, keep_cache=keep_cache, deadline=limit)
    await host.close(deadline=limit)


class TestReplica(ReplicaSuite):
    virtual = True
    _here: World

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Replica]:
        async with world() as here:
            self._here = here
            manager = await here.manager(settings(num_replicas=1, max_model_len=1024))
            yield manager.replicas()[0]

    async def commit(self, replica: Replica, version: int, *, keep_cache: bool) -> None:
        await _commit(self._here, replica, version, keep_cache=keep_cache)


class TestManager(LLMServerManagerSuite):
    virtual = True
    _here: World

    @asynccontextmanager
    async def created(
        self, clock: Clock, *, num_replicas: int, start_rank: int | None = None
    ) -> AsyncIterator[LLMServerManager]:
        async with world() as here:
            self._here = here
            manager: ReplicaManager = await here.manager(settings(num_replicas=num_replicas), start_rank=start_rank)
            yield manager
            await manager.close(deadline=here.within(30.0))

    async def commit(self, replica: Replica, version: int) -> None:
        await _commit(self._here, replica, version, keep_cache=False)


class TestAgents(AgentLoopManagerSuite):
    virtual = True

    @asynccontextmanager
    async def created(
        self, clock: Clock, *, client: ObjectSpec, reward: ObjectSpec | None, sample_limit_s: float
    ) -> AsyncIterator[tuple[AgentLoopManager, Caller]]:
        async with world() as here:
            manager = await WorkerAgentLoopManager.create(
                AgentSettings(num_workers=2, sample_limit_s=sample_limit_s),
                runtime=here.runtime,
                client=client,
                reward=reward,
                events=here.events,
                deadline=Deadline.after(clock, 30.0),
            )
            yield manager, here.runtime
            await manager.close(deadline=Deadline.after(clock, 30.0))
