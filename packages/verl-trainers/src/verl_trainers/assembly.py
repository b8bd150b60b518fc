"""From a checked configuration to a loop that runs, for a whole run and for each part of one.

Owns what the loop is given. It prevents a part of a run from being another program: what is left out is left out of
the same loop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import RunFailed
from verl_contracts.runtime import RuntimeSettings
from verl_contracts.tokens import SamplingParams
from verl_contracts.waits import watch_waits
from verl_trainers.config.engine import logprob_diff_limit
from verl_trainers.core.admission import BoundedAdmission
from verl_trainers.core.loop import LoopLimits, LoopParts, LoopReport, TrainingLoop
from verl_trainers.core.producer import GroupRules
from verl_trainers.core.store import GroupStore
from verl_trainers.core.validation import Validator
from verl_trainers.partial.rollout_file import head_of
from verl_trainers.partial.rules import part_of
from verl_trainers.partial.saving import RolloutSaver
from verl_trainers.partial.verifying import verify_syncs
from verl_trainers.starting import RunInputs, Started, Starter, cancel, stop

if TYPE_CHECKING:
    from verl_contracts.runtime import Runtime
    from verl_contracts.training import PolicyWorkers, Schedule
    from verl_trainers.core.producer import GroupPlayer

__all__ = ["run_parts"]


async def run_parts(inputs: RunInputs) -> LoopReport:
    """Start everything, do what is asked for, write what it made, and stop everything.

    Raises what the first failing part raised; nothing is left running in any case.
    """
    config, clock = inputs.resolved.config, SystemClock()
    start = Deadline.after(clock, config.trainer.start_limit_s, setting="trainer.start_limit_s")
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
        stack.push_async_callback(stop, "runtime", runtime.close)
        watchdog = asyncio.create_task(watch_waits(clock=clock))
        stack.push_async_callback(cancel, watchdog)
        started = await Starter(inputs=inputs, runtime=runtime, deadline=start, stack=stack).start()
        inputs.events.emit("run.started", {"seconds": start.limit_s - start.remaining(clock)})
        if inputs.rollouts is not None:
            saver = RolloutSaver(started.workers, path=inputs.rollouts, head=head_of(config), caller=runtime)
            report = await _loop(inputs, runtime, started, saver).run()
            saver.finish()
            return report
        if part_of(config) == "verify_only" and started.servers is not None and started.checkpoint is not None:
            differences = await verify_syncs(
                started.workers,
                started.servers,
                started.checkpoint,
                inputs.data,
                temperature=config.actor_rollout_ref.rollout.temperature,
                max_tokens=config.data.max_response_length,
                limit=logprob_diff_limit(config),
                limit_s=config.trainer.sync_limit_s,
                clock=clock,
            )
            return LoopReport(logprob_diffs=differences, final_version=1)
        report = await _loop(inputs, runtime, started, started.workers).run()
        if part_of(config) == "val_only":
            if not report.validations or report.validations[-1].score is None:
                raise RunFailed("trainer.val_only=true, and no held-out sample was scored; the log says why")
            return report
        await started.workers.save(inputs.model_dir, deadline=Deadline.after(clock, config.trainer.step_limit_s))
    return report


def _loop(inputs: RunInputs, runtime: Runtime, started: Started, workers: PolicyWorkers) -> TrainingLoop:
    config, clock = inputs.resolved.config, runtime.clock
    rollout, schedule = config.actor_rollout_ref.rollout, _schedule(inputs)
    in_play = (inputs.resolved.plan.schedule.max_staleness + 1) * config.data.train_batch_size
    return TrainingLoop(
        parts=LoopParts(
            admission=BoundedAdmission(
                max_staleness=schedule.max_staleness,
                batch_groups=config.data.train_batch_size,
                total_steps=max(1, inputs.total_steps),
                most_outstanding=in_play if inputs.rollouts is not None else None,
            ),
            store=GroupStore(),
            data=inputs.data,
            agents=started.agents,
            servers=started.servers,
            checkpoint=started.checkpoint,
            workers=workers,
            clock=clock,
            events=inputs.events,
            trackers=inputs.trackers,
            validator=_validator(inputs, started.agents) if inputs.validation else None,
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
        schedule=schedule,
        total_steps=inputs.total_steps,
        batch_groups=config.data.train_batch_size,
        limits=LoopLimits(
            wait_s=config.trainer.wait_limit_s,
            step_s=config.trainer.step_limit_s,
            sync_s=config.trainer.sync_limit_s,
        ),
        test_freq=config.trainer.test_freq,
        val_before_train=config.trainer.val_before_train,
        trains=part_of(config) in ("whole", "train_only"),
        logprob_diff_limit=logprob_diff_limit(config),
    )


def _schedule(inputs: RunInputs) -> Schedule:
    """Return the mode's schedule; one that never moves weights for a run that only generates."""
    schedule = inputs.resolved.plan.schedule
    if inputs.rollouts is None:
        return schedule
    steps = inputs.total_steps
    return replace(schedule, max_staleness=steps, sync_every=steps + 1, sleep_while_training=False)


def _sampling(inputs: RunInputs, temperature: float, top_p: float, top_k: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=inputs.resolved.config.data.max_response_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=inputs.stop_token_ids,
    )


def _validator(inputs: RunInputs, agents: GroupPlayer) -> Validator:
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
