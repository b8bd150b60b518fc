"""Starts the parts of a run, and stops them: what needs what, and what can start beside what.

It refuses to know any implementation: every part is loaded by name through its contract. It prevents half-started runs:
whatever was started is stopped, in reverse, also after a failed start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.agents import AgentSettings
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.runtime import Bundle, PlacementRequest
from verl_contracts.weights import CheckpointSettings
from verl_trainers.config.placing import build_rollout_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from verl_contracts.agents import AgentLoopManager
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import LLMServerManager
    from verl_contracts.runtime import DeviceGrant, ObjectSpec, Runtime
    from verl_contracts.samples import Prompt
    from verl_contracts.tracking import Tracker
    from verl_contracts.training import DataSource
    from verl_contracts.weights import CheckpointEngineManager
    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.core.producer import GroupPlayer
    from verl_trainers.partial.replay import SavedGroups
    from verl_trainers.sample_log import SampleLog
    from verl_trainers.workers.group import PolicyWorkerGroup

__all__ = ["RunInputs", "Started", "Starter", "cancel", "stop"]

_log = logging.getLogger(__name__)

STOP_LIMIT_S = 30.0
"""Longest that stopping any one part may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Everything that a run needs and that lives in the driver."""

    resolved: ResolvedConfig
    """The configuration, with the classes and the plan that follow from it."""
    device: str
    """``cpu`` or ``cuda``."""
    total_steps: int
    data: DataSource
    validation: Sequence[Prompt]
    """Held-out prompts; empty for none."""
    stop_token_ids: tuple[int, ...]
    reward: ObjectSpec | None
    """Builds the `RewardClient`; None leaves groups unscored."""
    events: EventSink
    trackers: Sequence[Tracker]
    log_dir: str | None
    """Folder for the logs of actors; None keeps none."""
    model_dir: str
    """Where the final policy is written."""
    samples: SampleLog | None = None
    """Writes some samples of each step down; None writes none."""
    saved: SavedGroups | None = None
    """Is trained on instead of what replicas would generate, and is `data` too; None generates."""
    rollouts: Path | None = None
    """File that groups are saved in instead of being trained on; None trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The running parts that the loop works with."""

    agents: GroupPlayer
    servers: LLMServerManager | None
    """None when saved groups are trained on; so is `checkpoint`."""
    workers: PolicyWorkerGroup
    checkpoint: CheckpointEngineManager | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """Starts the parts in the order that they need each other; slow ones side by side."""

    inputs: RunInputs
    runtime: Runtime
    deadline: Deadline
    stack: AsyncExitStack

    async def start(self) -> Started:
        """Start everything. What was started is pushed on `stack`, also when this raises."""
        resolved = self.inputs.resolved
        placement, config = resolved.plan.placement, resolved.config
        bundle = Bundle(cpus=1.0, gpus=1.0 if self.inputs.device == "cuda" else 0.0)
        trainer = await self.runtime.place(
            PlacementRequest(pool="trainer", bundles=(bundle,) * placement.trainer_devices), deadline=self.deadline
        )
        self.stack.push_async_callback(self.runtime.release, trainer)
        if self.inputs.saved is not None:
            workers = await self._workers(trainer)
            return Started(agents=self.inputs.saved, servers=None, workers=workers, checkpoint=None)
        if placement.hybrid:
            trainer = trainer.shared(0.5)
        servers_task = asyncio.create_task(self._servers(trainer if placement.hybrid else None))
        workers_task = asyncio.create_task(self._workers(trainer))
        tasks: tuple[asyncio.Task[object], ...] = (servers_task, workers_task)
        try:
            await asyncio.gather(*tasks)  # wait: each part is bounded by the start deadline
        except BaseException:
            await cancel(*tasks)
            raise
        servers, workers = servers_task.result(), workers_task.result()
        agents = await self._agents(servers)
        rollout = config.actor_rollout_ref.rollout
        engine = rollout.checkpoint_engine
        checkpoint = await resolved.plugins.checkpoint_manager.create(
            CheckpointSettings(
                backend=engine.backend,
                bucket_bytes=engine.update_weights_bucket_megabytes * 1024 * 1024,
                verification=engine.verification,
                pause_mode=resolved.plan.schedule.pause_mode,
                phase_limit_s=engine.phase_limit_s,
                replicas_at_once=engine.replicas_at_once,
                min_healthy=engine.min_healthy,
                options=engine.engine_kwargs,
            ),
            sender=workers.sender_host,
            replicas=servers.replicas(),
            clock=self.runtime.clock,
            events=self.inputs.events,
        )
        self.stack.push_async_callback(stop, "checkpoint-engine manager", checkpoint.close)
        return Started(agents=agents, servers=servers, workers=workers, checkpoint=checkpoint)

    async def _servers(self, grant: DeviceGrant | None) -> LLMServerManager:
        resolved = self.inputs.resolved
        servers = await resolved.plugins.llm_server_manager.create(
            build_rollout_settings(resolved.config, resolved.plan.placement),
            runtime=self.runtime,
            grant=grant,
            start_rank=None,
            events=self.inputs.events,
            deadline=self.deadline,
        )
        self.stack.push_async_callback(stop, "LLM server manager", servers.close)
        return servers

    async def _workers(self, grant: DeviceGrant) -> PolicyWorkerGroup:
        from verl_trainers.workers.group import PolicyWorkerGroup  # torch is needed only from here on

        workers = await PolicyWorkerGroup.create(
            runtime=self.runtime,
            grant=grant,
            config=self.inputs.resolved.config,
            total_steps=self.inputs.total_steps,
            deadline=self.deadline,
        )
        self.stack.push_async_callback(stop, "policy workers", workers.close)
        return workers

    async def _agents(self, servers: LLMServerManager) -> AgentLoopManager:
        config = self.inputs.resolved.config
        agent = config.actor_rollout_ref.rollout.agent
        agents = await self.inputs.resolved.plugins.agent_loop_manager.create(
            AgentSettings(
                num_workers=agent.num_workers,
                loop=agent.default_agent_loop,
                loop_options=agent.agent_loop_options,
                sample_limit_s=agent.sample_limit_s,
                model_path=config.actor_rollout_ref.model.path,
                options=agent.agent_loop_manager_options,
            ),
            runtime=self.runtime,
            client=servers.client_spec(),
            reward=self.inputs.reward,
            events=self.inputs.events,
            deadline=self.deadline,
        )
        self.stack.push_async_callback(stop, "agent-loop manager", agents.close)
        return agents


async def stop(name: str, close: Callable[..., Awaitable[None]]) -> None:
    """Stop one part within its limit. What goes wrong is logged, so that the others are stopped too."""
    try:
        await close(deadline=Deadline.after(SystemClock(), STOP_LIMIT_S))
    except Exception:
        _log.exception("the %s did not stop cleanly", name)


async def cancel(*tasks: asyncio.Task[object]) -> None:
    """Cancel tasks, and return when they have ended."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task  # wait: it was cancelled
