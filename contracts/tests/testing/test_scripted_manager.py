from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline
from verl_contracts.events import NullEvents
from verl_contracts.plugins import check_plugin, families
from verl_contracts.rollout import RolloutSettings
from verl_contracts.runtime import RuntimeSettings
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.scripted import ScriptedReplica
from verl_contracts.testing.scripted_manager import ScriptedManager
from verl_contracts.testing.suites.manager import LLMServerManagerSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import LLMServerManager, Replica


class TestScriptedManager(LLMServerManagerSuite):
    virtual = True

    @asynccontextmanager
    async def created(
        self, clock: Clock, *, num_replicas: int, start_rank: int | None = None
    ) -> AsyncIterator[LLMServerManager]:
        deadline = Deadline.after(clock, 5.0)
        runtime = await InProcessRuntime.create(RuntimeSettings(run_id="t"), clock=clock, events=NullEvents())
        manager = await ScriptedManager.create(
            RolloutSettings(model_path="", num_replicas=num_replicas),
            runtime=runtime,
            grant=None,
            start_rank=start_rank,
            events=NullEvents(),
            deadline=deadline,
        )
        yield manager
        await manager.close(deadline=deadline)

    async def commit(self, replica: Replica, version: int) -> None:
        assert isinstance(replica, ScriptedReplica)
        replica.commit(version, keep_cache=False)


def test_scripted_manager_is_a_plugin() -> None:
    check_plugin(families.LLM_SERVER_MANAGER, ScriptedManager, key="k")
