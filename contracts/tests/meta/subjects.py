"""How each reference is handed to its suite. Suites under test are built from these with one part replaced."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from references import Admission, Agents, Balancer, Length, Store

from verl_contracts.clock import Deadline
from verl_contracts.events import NullEvents
from verl_contracts.rewards import RewardRequest
from verl_contracts.runtime import ActorContext, RuntimeSettings
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.scripted import Script, ScriptedReplica
from verl_contracts.testing.scripted_agents import ScriptedClient, ScriptedReward
from verl_contracts.testing.suites.admission import AdmissionPolicySuite
from verl_contracts.testing.suites.agents import AgentLoopManagerSuite
from verl_contracts.testing.suites.balancer import LoadBalancerSuite
from verl_contracts.testing.suites.replica import ReplicaSuite
from verl_contracts.testing.suites.rewards import RewardFunctionSuite
from verl_contracts.testing.suites.runtime import RuntimeSuite
from verl_contracts.testing.suites.store import ExperienceStoreSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from verl_contracts.agents import AgentLoopManager
    from verl_contracts.clock import Clock
    from verl_contracts.rewards import RewardFunction
    from verl_contracts.rollout import LoadBalancer, Replica
    from verl_contracts.runtime import Caller, ObjectSpec, Runtime
    from verl_contracts.training import AdmissionPolicy, ExperienceStore


class AdmissionSubject(AdmissionPolicySuite):
    kind = Admission
    examples = 60
    shrinks = False

    def policy(self, *, max_staleness: int, batch_groups: int) -> AdmissionPolicy:
        return self.kind(max_staleness=max_staleness, batch_groups=batch_groups)


class BalancerSubject(LoadBalancerSuite):
    kind = Balancer

    async def balancer(self, clock: Clock) -> LoadBalancer:
        return self.kind(clock)


class StoreSubject(ExperienceStoreSuite):
    kind = Store

    def store(self) -> ExperienceStore:
        return self.kind()


class RewardSubject(RewardFunctionSuite):
    kind = Length

    def function(self) -> RewardFunction:
        return self.kind()

    def cases(self) -> Sequence[tuple[RewardRequest, str, float]]:
        request = RewardRequest(uid="0-0-0", sample=0, data_source="t", response_ids=(1,), ground_truth="abcd")
        return [(request, "abcd", 1.0), (request, "abxx", 0.5), (request, "zzzz", 0.0)]


class ReplicaSubject(ReplicaSuite):
    virtual = True
    kind = ScriptedReplica

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Replica]:
        yield self.kind("s0", clock=clock, script=Script(answer=lambda prompt: tuple(range(1, 1000))))

    async def commit(self, replica: Replica, version: int, *, keep_cache: bool) -> None:
        assert isinstance(replica, ScriptedReplica)
        replica.commit(version, keep_cache=keep_cache)

    def adapter_folder(self) -> str:
        return str(Path(__file__).parents[1] / "adapter")


class RuntimeSubject(RuntimeSuite):
    virtual = True
    processes = False
    kind = InProcessRuntime

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Runtime]:
        runtime = await self.kind.create(RuntimeSettings(run_id="t"), clock=clock, events=NullEvents())
        yield runtime
        await runtime.close(deadline=Deadline.after(clock, 5.0))


class AgentsSubject(AgentLoopManagerSuite):
    virtual = True
    kind = Agents

    @asynccontextmanager
    async def created(
        self, clock: Clock, *, client: ObjectSpec, reward: ObjectSpec | None, sample_limit_s: float
    ) -> AsyncIterator[tuple[AgentLoopManager, Caller]]:
        runtime = await InProcessRuntime.create(RuntimeSettings(run_id="t"), clock=clock, events=NullEvents())
        context = ActorContext(run_id="t", role="agent", rank=0, caller=runtime, clock=clock, failures=runtime)
        manager = self.kind(
            context=context,
            client=ScriptedClient(context=context, version=4),
            reward=None if reward is None else ScriptedReward(context=context),
            sample_limit_s=sample_limit_s,
        )
        yield manager, runtime  # type: ignore[misc]
