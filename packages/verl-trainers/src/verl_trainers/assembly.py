"""From a checked configuration to a running system: what is placed, spawned and connected, and how it is taken down.

It owns the order of starting and stopping. It refuses to know any implementation: every part is loaded by name through
its contract. It prevents half-started runs: whatever was started is stopped, in reverse, also after a failed start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.agents import AgentSettings
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.rollout import RolloutSettings
from verl_contracts.runtime import Bundle, PlacementRequest, RuntimeSettings
from verl_contracts.tokens import SamplingParams
from verl_contracts.waits import watch_waits
from verl_contracts.weights import CheckpointSettings
from verl_trainers.core.admission import BoundedAdmission
from verl_trainers.core.loop import LoopLimits, LoopParts, TrainingLoop
from verl_trainers.core.producer import GroupRules
from verl_trainers.core.store import GroupStore
from verl_trainers.core.validation import Validator

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from verl_contracts.agents import AgentLoopManager
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import LLMServerManager
    from verl_contracts.runtime import DeviceGrant, ObjectSpec, Runtime
    from verl_contracts.samples import Prompt
    from verl_contracts.tracking import Tracker
    from verl_contracts.training import DataSource
    from verl_contracts.weights import CheckpointEngineManager
    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.core.loop import LoopReport
    from verl_trainers.sample_log import SampleLog
    from verl_trainers.workers.group import PolicyWorkerGroup

__all__ = ["RunInputs", "run_parts"]

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


async def run_parts(inputs: RunInputs) -> LoopReport:
    """Start everything, train, write the final policy, and stop everything.

    Raises what the first failing part raised; nothing is left running in any case.
    """
    config, plan, clock = inputs.resolved.config, inputs.resolved.plan, SystemClock()
    start = Deadline.after(clock, config.trainer.start_limit_s)
    async with AsyncExitStack() as stack:
        runtime = await inputs.resolved.plugins.runtime.create(
            RuntimeSettings(
                run_id=f"{time.strftime('%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}",
                log_dir=inputs.log_dir,
                options=config.runtime_options,
            ),
            clock=clock,
            events=inputs.events,
        )
        stack.push_async_callback(_stop, "runtime", runtime.close)
        watchdog = asyncio.create_task(watch_waits(clock=clock))
        stack.push_async_callback(_cancel, watchdog)
        starter = _Starter(inputs=inputs, runtime=runtime, deadline=start, stack=stack)
        agents, servers, workers, checkpoint = await starter.start()
        inputs.events.emit("run.started", {"seconds": start.limit_s - start.remaining(clock)})
        rollout = config.actor_rollout_ref.rollout
        loop = TrainingLoop(
            parts=LoopParts(
                admission=BoundedAdmission(
                    max_staleness=plan.schedule.max_staleness,
                    batch_groups=config.data.train_batch_size,
                    total_steps=inputs.total_steps,
                ),
                store=GroupStore(),
                data=inputs.data,
                agents=agents,
                servers=servers,
                checkpoint=checkpoint,
                workers=workers,
                clock=clock,
                events=inputs.events,
                trackers=inputs.trackers,
                validator=_validator(inputs, agents) if inputs.validation else None,
                failures=runtime.watch(),
                on_batch=inputs.samples.attach(runtime) if inputs.samples is not None else None,
            ),
            rules=GroupRules(
                n=rollout.n,
                sampling=_sampling(inputs, rollout.temperature, rollout.top_p, rollout.top_k),
                group_limit_s=config.trainer.wait_limit_s,
                unusable=config.reward.unusable,
                max_unusable_ratio=config.reward.max_unusable_ratio,
            ),
            schedule=plan.schedule,
            total_steps=inputs.total_steps,
            batch_groups=config.data.train_batch_size,
            limits=LoopLimits(
                wait_s=config.trainer.wait_limit_s,
                step_s=config.trainer.step_limit_s,
                sync_s=config.trainer.sync_limit_s,
            ),
            test_freq=config.trainer.test_freq,
            val_before_train=config.trainer.val_before_train,
        )
        report = await loop.run()
        await workers.save(inputs.model_dir, deadline=Deadline.after(clock, config.trainer.step_limit_s))
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starter:
    """Starts the parts in the order that they need each other; slow ones side by side."""

    inputs: RunInputs
    runtime: Runtime
    deadline: Deadline
    stack: AsyncExitStack

    async def start(self) -> tuple[AgentLoopManager, LLMServerManager, PolicyWorkerGroup, CheckpointEngineManager]:
        resolved = self.inputs.resolved
        placement, config = resolved.plan.placement, resolved.config
        bundle = Bundle(cpus=1.0, gpus=1.0 if self.inputs.device == "cuda" else 0.0)
        trainer = await self.runtime.place(
            PlacementRequest(pool="trainer", bundles=(bundle,) * placement.trainer_devices), deadline=self.deadline
        )
        self.stack.push_async_callback(self.runtime.release, trainer)
        if placement.hybrid:
            trainer = trainer.shared(0.5)
        servers_task = asyncio.create_task(self._servers(trainer if placement.hybrid else None))
        workers_task = asyncio.create_task(self._workers(trainer))
        tasks: tuple[asyncio.Task[object], ...] = (servers_task, workers_task)
        try:
            await asyncio.gather(*tasks)  # wait: each part is bounded by the start deadline
        except BaseException:
            await _cancel(*tasks)
            raise
        servers, workers = servers_task.result(), workers_task.result()
        agents = await self._agents(servers)
        rollout = config.actor_rollout_ref.rollout
        engine = rollout.checkpoint_engine
        checkpoint = await resolved.plugins.checkpoint_manager.create(
            CheckpointSettings(
                backend=engine.backend,
                bucket_bytes=engine.update_weights_bucket_megabytes * 1024 * 1024,
                pause_mode=resolved.plan.schedule.pause_mode,
                phase_limit_s=engine.phase_limit_s,
                min_healthy=engine.min_healthy,
                options=engine.engine_kwargs,
            ),
            sender=workers.sender_host,
            replicas=servers.replicas(),
            clock=self.runtime.clock,
            events=self.inputs.events,
        )
        self.stack.push_async_callback(_stop, "checkpoint-engine manager", checkpoint.close)
        return agents, servers, workers, checkpoint

    async def _servers(self, grant: DeviceGrant | None) -> LLMServerManager:
        resolved = self.inputs.resolved
        config, rollout = resolved.config, resolved.config.actor_rollout_ref.rollout
        servers = await resolved.plugins.llm_server_manager.create(
            RolloutSettings(
                model_path=config.actor_rollout_ref.model.path,
                engine=rollout.name,
                num_replicas=max(1, resolved.plan.placement.standalone_devices // rollout.tensor_model_parallel_size),
                devices_per_replica=rollout.tensor_model_parallel_size,
                dtype=rollout.dtype,
                max_model_len=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
                max_num_seqs=rollout.max_num_seqs,
                seed=config.trainer.seed,
                deterministic=config.deterministic,
                weight_backend=rollout.checkpoint_engine.backend,
                resumable=rollout.partial_rollout,
                request_limit_s=rollout.request_limit_s,
                options=rollout.llm_server_manager_options,
            ),
            runtime=self.runtime,
            grant=grant,
            start_rank=None,
            events=self.inputs.events,
            deadline=self.deadline,
        )
        self.stack.push_async_callback(_stop, "LLM server manager", servers.close)
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
        self.stack.push_async_callback(_stop, "policy workers", workers.close)
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
        self.stack.push_async_callback(_stop, "agent-loop manager", agents.close)
        return agents


def _sampling(inputs: RunInputs, temperature: float, top_p: float, top_k: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=inputs.resolved.config.data.max_response_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=inputs.stop_token_ids,
    )


def _validator(inputs: RunInputs, agents: AgentLoopManager) -> Validator:
    how = inputs.resolved.config.actor_rollout_ref.rollout.val_kwargs
    return Validator(
        prompts=inputs.validation,
        agents=agents,
        n=how.n,
        sampling=_sampling(inputs, how.temperature, how.top_p, how.top_k),
        limit_s=inputs.resolved.config.trainer.wait_limit_s,
        clock=SystemClock(),
        events=inputs.events,
    )


async def _stop(name: str, close: Callable[..., Awaitable[None]]) -> None:
    """Stop one part within its limit. What goes wrong is logged, so that the others are stopped too."""
    try:
        await close(deadline=Deadline.after(SystemClock(), STOP_LIMIT_S))
    except Exception:
        _log.exception("the %s did not stop cleanly", name)


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task  # wait: it was cancelled
