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
from verl_trainers.config.mistakes import config_error
from verl_trainers.config.prepare import load_prepare
from verl_trainers.config.steps import StepCount, count_steps
from verl_trainers.data.source import PromptSource
from verl_trainers.data.tokenizer import PromptTokenizer
from verl_trainers.partial.replay import SavedGroups, count_saved_steps
from verl_trainers.partial.rules import part_of
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
    from verl_trainers.config.schema import RunConfig
    from verl_trainers.run_folder import RunFolder

__all__ = ["RunData", "open_data", "open_run", "run_training"]

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
    """Read and check what the part of a run that is asked for needs. Raises as `open_data` does."""
    config = resolved.config
    part = part_of(config)
    if part == "train_only":
        saved = SavedGroups.open(config)
        steps = count_saved_steps(config, saved.num_rows, max_staleness=resolved.plan.schedule.max_staleness)
        return RunData(train=saved, saved=saved, validation=(), steps=steps, stop_token_ids=())
    if part == "val_only":
        tokenizer = _tokenizer(config)
        held_out = _held_out(config, tokenizer)
        steps = StepCount(steps=0, epochs=0, tail=0, message=f"no step; {len(held_out)} held-out prompts")
        nothing = PromptSource((), epochs=1, shuffle=False, seed=0)
        return RunData(train=nothing, validation=held_out, steps=steps, stop_token_ids=tokenizer.stop_token_ids)
    return open_data(config)


def open_data(config: RunConfig) -> RunData:
    """Read, check and tokenize all data. Raises `DataError`, or `ConfigError` when it makes no full step."""
    data, tokenizer = config.data, _tokenizer(config)
    epochs = config.trainer.total_epochs if config.trainer.total_training_steps is None else None
    train = PromptSource.open(data, files=data.train_files, tokenizer=tokenizer, epochs=epochs)
    steps = count_steps(config, train.num_rows)
    return RunData(
        train=train,
        validation=_held_out(config, tokenizer),
        steps=steps,
        stop_token_ids=tokenizer.stop_token_ids,
    )


def _tokenizer(config: RunConfig) -> PromptTokenizer:
    model = config.actor_rollout_ref.model
    return PromptTokenizer(model.path, trust_remote_code=model.trust_remote_code)


def _held_out(config: RunConfig, tokenizer: PromptTokenizer) -> tuple[Prompt, ...]:
    data = config.data
    if not data.val_files:
        return ()
    source = PromptSource.open(data, files=data.val_files, tokenizer=tokenizer, epochs=1, shuffle=False)
    return tuple(iter(source.next, None))


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
    device = _device(config)
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
                    samples=SampleLog(folder.samples, decode=load_decoder(config.actor_rollout_ref.model.path)),
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


def _device(config: RunConfig) -> str:
    if config.trainer.device != "auto":
        return config.trainer.device
    import torch  # here, because importing it takes a second

    return "cuda" if torch.cuda.is_available() else "cpu"
