"""One run from a checked configuration to its summary: data and tokenizer in, run folder out.

Owns the order in the driver before and after the run proper, which `assembly` owns. Everything that can be known to be
wrong is said here before a process is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.clock import SystemClock
from verl_contracts.tracking import TrackedRun
from verl_trainers.assembly import run_parts
from verl_trainers.config.check import check_files
from verl_trainers.config.dump import dump_config
from verl_trainers.config.mistakes import Mistake, config_error
from verl_trainers.config.placing import run_device
from verl_trainers.config.prepare import load_prepare
from verl_trainers.config.steps import StepCount
from verl_trainers.data.source import PromptSource
from verl_trainers.partial.rules import part_of
from verl_trainers.preflight import preflight
from verl_trainers.rewards.client import reward_spec
from verl_trainers.rewards.decode import load_decoder
from verl_trainers.run_folder import JsonlEvents
from verl_trainers.sample_log import SampleLog
from verl_trainers.starting import RunInputs
from verl_trainers.summary import summarize
from verl_trainers.tracking.run import tracked
from verl_trainers.tracking.tree import plain_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from verl_contracts.events import JsonValue
    from verl_contracts.samples import Prompt
    from verl_contracts.training import DataSource
    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.partial.replay import SavedGroups
    from verl_trainers.run_folder import RunFolder

__all__ = ["RunData", "open_run", "run_training"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run reads, and how many steps it makes of it."""

    train: DataSource
    validation: tuple[Prompt, ...]
    steps: StepCount
    stop_token_ids: tuple[int, ...]
    saved: SavedGroups | None = None
    """The same as `train`, when saved groups are trained on; None otherwise."""


def open_run(resolved: ResolvedConfig) -> RunData:
    """Read and check what the part of a run that is asked for needs. Raises `ConfigError` with every mistake."""
    report = preflight(resolved)
    report.require()
    for warning in report.warnings:
        _log.warning("%s", warning)
    inputs = report.inputs
    held_out = () if inputs is None or inputs.validation is None else tuple(iter(inputs.validation.next, None))
    if inputs is not None and part_of(resolved.config) == "val_only":
        steps = StepCount(steps=0, epochs=0, tail=0, message=f"no step; {len(held_out)} held-out prompts")
        nothing = PromptSource((), epochs=1, shuffle=False, seed=0)
        return RunData(train=nothing, validation=held_out, steps=steps, stop_token_ids=inputs.stop_token_ids)
    train = None if inputs is None else inputs.saved or inputs.train
    if inputs is None or train is None or inputs.steps is None:
        raise config_error(check_files(resolved.config) or [Mistake(key="data.train_files", text="cannot be read")])
    return RunData(
        train=train,
        saved=inputs.saved,
        validation=held_out,
        steps=inputs.steps,
        stop_token_ids=() if inputs.saved is not None else inputs.stop_token_ids,
    )


def run_training(
    resolved: ResolvedConfig, folder: RunFolder, *, before_start: Callable[[], None] | None = None
) -> Mapping[str, JsonValue]:
    """Prepare, train, and fill `folder`; return the summary. `before_start` is called when all is ready to start.

    Raises `ConfigError` and `DataError` before anything is started, and the first failing part's error afterwards.
    """
    began = time.monotonic()
    config = resolved.config
    if config.prepare is not None:
        load_prepare(config.prepare)(folder.prepared)
    missing = check_files(config)
    if missing:
        raise config_error(missing)
    data = open_run(resolved)
    _log.info("%s", data.steps.message)
    device, model = run_device(config), config.actor_rollout_ref.model
    decode = load_decoder(model.path, trust_remote_code=model.trust_remote_code)
    derived = {"steps": data.steps.steps, "plan": resolved.plan, "device": device}
    folder.write_config(dump_config(config, derived=derived))
    clock = SystemClock()
    events = JsonlEvents(folder.events, clock=clock)
    tracked_run = TrackedRun(
        name=folder.path.name,
        run_dir=str(folder.path),
        total_steps=data.steps.steps,
        config=plain_fields(config),
    )
    with (
        contextlib.closing(events),
        tracked(resolved.plugins.trackers, config.trainer, tracked_run, progress=sys.stdout) as tracking,
    ):
        if before_start is not None:
            before_start()
        report = asyncio.run(
            run_parts(
                RunInputs(
                    resolved=resolved,
                    device=device,
                    total_steps=data.steps.steps,
                    data=data.train,
                    validation=data.validation,
                    stop_token_ids=data.stop_token_ids,
                    reward=reward_spec(config),
                    events=events,
                    trackers=tracking.trackers,
                    log_dir=str(folder.logs),
                    model_dir=str(folder.model),
                    samples=SampleLog(folder.samples, decode=decode),
                    saved=data.saved,
                    rollouts=folder.rollouts if part_of(config) == "rollout_only" else None,
                )
            )
        )
        summary = summarize(
            report,
            part=part_of(config),
            mode=config.trainer.mode,
            runtime=config.runtime,
            wall_s=round(time.monotonic() - began, 3),
        )
        tracking.summary = summary
    summary["trackers"] = tracking.reports()
    folder.write_summary(summary)
    return summary
