"""The data and the model's folder of a run, read and judged together: what `check` says is what a run then trains on.

Reading goes on after the first mistake: files, tokenizer and model do not depend on each other.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError, DataError
from verl_trainers.config.mistakes import Mistake
from verl_trainers.config.placing import max_model_len
from verl_trainers.config.steps import count_steps
from verl_trainers.data.source import PromptSource
from verl_trainers.data.tokenizer import PromptTokenizer
from verl_trainers.partial.replay import SavedGroups, count_saved_steps
from verl_trainers.partial.rules import READ_TRAIN_FILES, part_of
from verl_trainers.preflight.model import read_model, weight_problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_contracts.training import ModePlan
    from verl_trainers.config.schema import RunConfig
    from verl_trainers.config.steps import StepCount
    from verl_trainers.preflight.model import ModelFacts

__all__ = ["InputFindings", "read_inputs"]

_MODEL = "actor_rollout_ref.model.path"


@dataclass(slots=True, kw_only=True)
class InputFindings:
    """What was read. A part is None when it could not be read, or the configuration names none."""

    mistakes: list[Mistake]
    lines: list[str]
    warnings: list[str] = field(default_factory=list)
    train: PromptSource | None = None
    validation: PromptSource | None = None
    saved: SavedGroups | None = None
    steps: StepCount | None = None
    stop_token_ids: tuple[int, ...] = ()
    model: ModelFacts | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Run `action`, and note the mistake that it raises."""
        try:
            action()
        except (ConfigError, DataError) as exc:
            self.mistakes.append(Mistake.parse(str(exc)))


def read_inputs(config: RunConfig, plan: ModePlan | None) -> InputFindings:
    """Read all that is there and that the part of a run that is asked for needs.

    Files that are not there are `check_files`' business, and are passed over here. A `plan` of None is one that cannot
    be made; steps of saved groups are then not counted.
    """
    found = InputFindings(mistakes=[], lines=[])
    model, data = config.actor_rollout_ref.model, config.data
    epochs = config.trainer.total_epochs if config.trainer.total_training_steps is None else None
    tokenizers: list[PromptTokenizer] = []

    def read_folder() -> None:
        found.model = read_model(model.path, trust_remote_code=model.trust_remote_code)
        _check_lengths(found, config)

    def read_tokenizer() -> None:
        tokenizers.append(PromptTokenizer(model.path, trust_remote_code=model.trust_remote_code))
        found.stop_token_ids = tokenizers[0].stop_token_ids

    def read_train() -> None:
        found.train = PromptSource.open(data, files=data.train_files, tokenizer=tokenizers[0], epochs=epochs)
        found.lines.append(f"data.train_files: {_lengths_line(found.train, config)}")
        found.warnings += _truth_warnings(found.train, config, "data.train_files")
        if data.train_batch_size >= 1 and config.trainer.total_epochs >= 1:  # else it is said elsewhere
            found.steps = count_steps(config, found.train.num_rows)
            found.lines.append(found.steps.message)

    def read_validation() -> None:
        found.validation = PromptSource.open(
            data, files=data.val_files, tokenizer=tokenizers[0], epochs=1, shuffle=False, key="data.val_files"
        )
        found.lines.append(f"data.val_files: {_lengths_line(found.validation, config)}")
        found.warnings += _truth_warnings(found.validation, config, "data.val_files")

    if model.path and (Path(model.path) / "config.json").is_file():
        found.attempt(read_folder)
        found.attempt(lambda: _check_weights(found, model.path))
        found.attempt(read_tokenizer)
    part = part_of(config)
    if found.model is not None and part == "train_only" and _are_there(data.rollout_files):
        found.attempt(lambda: _read_saved(found, config, plan))
    if tokenizers and part in READ_TRAIN_FILES and _are_there(data.train_files):
        found.attempt(read_train)
    if tokenizers and part != "train_only" and _are_there(data.val_files):
        found.attempt(read_validation)
    return found


def _read_saved(found: InputFindings, config: RunConfig, plan: ModePlan | None) -> None:
    saved = found.saved = SavedGroups.open(config)
    found.lines.append(f"data.rollout_files: {saved.num_rows} saved groups")
    if plan is not None:
        found.steps = count_saved_steps(config, saved.num_rows, max_staleness=plan.schedule.max_staleness)
        found.lines.append(found.steps.message)


def _are_there(files: tuple[str, ...]) -> bool:
    return bool(files) and all(Path(file).is_file() for file in files)


def _check_weights(found: InputFindings, path: str) -> None:
    found.mistakes += [Mistake(key=_MODEL, text=problem) for problem in weight_problems(path)]


def _check_lengths(found: InputFindings, config: RunConfig) -> None:
    """Compare the longest sequence with what the model has positions for."""
    model, longest = found.model, max_model_len(config)
    if model is None:
        return
    found.lines.append(
        f"model: {model.model_type}, {model.num_parameters:,} parameters, {model.num_layers} layers, "
        f"{model.max_positions or 'unknown'} positions"
    )
    if model.max_positions is None or longest <= model.max_positions:
        return
    told = config.actor_rollout_ref.rollout.max_model_len is not None
    key = "actor_rollout_ref.rollout.max_model_len" if told else "data.max_response_length"
    sums = (
        f"is {longest}"
        if told
        else f"and data.max_prompt_length together are {config.data.max_response_length} + "
        f"{config.data.max_prompt_length} = {longest} tokens"
    )
    text = f"{sums}, and the model has {model.max_positions} positions (max_position_embeddings); lower it"
    found.mistakes.append(Mistake(key=key, text=text, uses=("data.max_prompt_length", _MODEL)))


def _truth_warnings(source: PromptSource, config: RunConfig, key: str) -> list[str]:
    """Warn of rows that a reward can only guess about. Some rewards compare with nothing, so it is no mistake."""
    if not source.num_without_truth:
        return []
    custom = config.reward.custom_reward_function
    who = custom.name if custom.path is not None else f"the reward {config.reward.name!r}"
    return [
        f"{key}: {source.num_without_truth} of {source.num_rows} rows have no reward_model.ground_truth, so {who} gets "
        "None; write it into the rows, unless the reward does without"
    ]


def _lengths_line(source: PromptSource, config: RunConfig) -> str:
    lengths = source.lengths
    left_out = f"; {source.num_left_out} longer ones are left out" if source.num_left_out else ""
    return (
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):g} "
        f"(data.max_prompt_length={config.data.max_prompt_length}){left_out}"
    )
