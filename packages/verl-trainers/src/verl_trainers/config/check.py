"""Rules between keys: what would fail, or silently train on something else, long after the start.

Each rule shows its formula with the numbers. Whatever is accepted here must run; whatever is refused says why.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from verl_trainers.config.engine import check_engine
from verl_trainers.config.mistakes import Mistake
from verl_trainers.data.rows import KINDS, unknown_kind
from verl_trainers.partial.rules import READ_TRAIN_FILES, check_partial, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_trainers.config.schema import RunConfig

__all__ = ["MIN_TEMPERATURE", "check_files", "check_relations"]

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

AT_LEAST: dict[str, float] = {
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.train_batch_size": 1,
    f"{_ACTOR}.ppo_mini_batch_size": 1,
    f"{_ACTOR}.ppo_epochs": 1,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": 1,
    f"{_ACTOR}.clip_ratio_low": 0,
    f"{_ACTOR}.clip_ratio_high": 0,
    f"{_ACTOR}.entropy_coeff": 0,
    f"{_ACTOR}.kl_loss_coef": 0,
    f"{_ACTOR}.optim.lr": 0,
    f"{_ACTOR}.optim.lr_warmup_steps": 0,
    f"{_ACTOR}.optim.min_lr_ratio": 0,
    f"{_ACTOR}.optim.weight_decay": 0,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 1,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.top_k": 1,
    f"{_ROLLOUT}.tensor_model_parallel_size": 1,
    f"{_ROLLOUT}.max_model_len": 2,
    f"{_ROLLOUT}.max_num_seqs": 1,
    f"{_ROLLOUT}.n_gpus_per_node": 0,
    f"{_ROLLOUT}.max_num_batched_tokens": 1,
    f"{_ROLLOUT}.data_parallel_size": 1,
    f"{_ROLLOUT}.agent.num_workers": 1,
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1,
    f"{_ROLLOUT}.checkpoint_engine.min_healthy": 1,
    f"{_ROLLOUT}.checkpoint_engine.replicas_at_once": 1,
    f"{_ROLLOUT}.val_kwargs.n": 1,
    f"{_ROLLOUT}.val_kwargs.temperature": 0,
    f"{_ROLLOUT}.val_kwargs.top_k": 1,
    "reward.num_processes": 1,
    "reward.max_unusable_ratio": 0,
    "async_training.max_staleness": 0,
    "async_training.sync_every": 1,
    "trainer.total_training_steps": 1,
    "trainer.total_epochs": 1,
    "trainer.n_gpus_per_node": 1,
}
"""Smallest value of a number that is not null."""

MIN_TEMPERATURE = 0.01
"""Below it, sampling is greedy decoding, and log-probs divided by it overflow."""

ABOVE_ZERO = (
    f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.optim.eps",
    f"{_ROLLOUT}.temperature",
    f"{_ROLLOUT}.top_p",
    f"{_ROLLOUT}.val_kwargs.top_p",
    f"{_ROLLOUT}.gpu_memory_utilization",
    f"{_ROLLOUT}.logprob_diff_limit",
    f"{_ROLLOUT}.request_limit_s",
    f"{_ROLLOUT}.agent.sample_limit_s",
    f"{_ROLLOUT}.checkpoint_engine.phase_limit_s",
    "reward.limit_s",
    "reward.start_limit_s",
    "trainer.logger_limit_s",
    "trainer.device_memory_gb",
    "trainer.step_limit_s",
    "trainer.start_limit_s",
    "trainer.sync_limit_s",
    "trainer.wait_limit_s",
)
AT_MOST_ONE = (
    f"{_ACTOR}.clip_ratio_low",
    f"{_ACTOR}.optim.min_lr_ratio",
    f"{_ROLLOUT}.top_p",
    f"{_ROLLOUT}.val_kwargs.top_p",
    f"{_ROLLOUT}.gpu_memory_utilization",
    "reward.max_unusable_ratio",
)
MAX_SECONDS = 1e8
"""Longest limit, three years: clocks and timers of libraries overflow somewhere above."""


def check_relations(config: RunConfig) -> list[Mistake]:
    """Return every rule that `config` breaks. Looks at nothing outside of it."""
    rules = (
        _required,
        _ranges,
        _batch,
        _lengths,
        _log_probs,
        _temperature,
        check_engine,
        _optimizer,
        _reward,
        _tracking,
        _validation,
        check_partial,
    )
    return [mistake for rule in rules for mistake in rule(config)]


def _get(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _required(config: RunConfig) -> Iterator[Mistake]:
    if not config.data.train_files and part_of(config) in READ_TRAIN_FILES:
        yield Mistake(key="data.train_files", text="is required: JSONL or parquet files to train on")
    if not config.actor_rollout_ref.model.path:
        yield Mistake(key="actor_rollout_ref.model.path", text="is required: a Hugging Face folder")


def _ranges(config: RunConfig) -> Iterator[Mistake]:
    for key, low in AT_LEAST.items():
        value = _get(config, key)
        if isinstance(value, (int, float)) and value < low:
            yield Mistake(key=key, text=f"must be ≥ {low:g}, got {value:g}")
    for key in ABOVE_ZERO:
        value = _get(config, key)
        if isinstance(value, (int, float)) and value <= 0:
            yield Mistake(key=key, text=f"must be > 0, got {value:g}")
        elif isinstance(value, (int, float)) and key.endswith("_s") and value > MAX_SECONDS:
            yield Mistake(key=key, text=f"must be ≤ {MAX_SECONDS:g} seconds, which is three years, got {value:g}")
    for key in AT_MOST_ONE:
        value = _get(config, key)
        if isinstance(value, (int, float)) and value > 1:
            yield Mistake(key=key, text=f"must be ≤ 1, got {value:g}")
    for i, beta in enumerate(config.actor_rollout_ref.actor.optim.betas):
        if not 0 <= beta < 1:
            yield Mistake(key=f"{_ACTOR}.optim.betas", text=f"number {i + 1} must be in [0, 1), got {beta:g}")


def _batch(config: RunConfig) -> Iterator[Mistake]:
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    ranks = config.trainer.n_gpus_per_node
    if batch < 1 or n < 1 or ranks < 1 or (mini is not None and mini < 1):
        return  # out of range, which is said elsewhere
    if mini is not None and batch % mini != 0:
        yield Mistake(
            key=f"{_ACTOR}.ppo_mini_batch_size",
            text=f"must divide data.train_batch_size ({batch} % {mini} = {batch % mini}); otherwise the last update of "
            "a step would be on fewer groups than the others",
            uses=("data.train_batch_size",),
        )
    rows = (batch if mini is None else mini) * n
    if rows % ranks != 0:
        what = "data.train_batch_size" if mini is None else f"{_ACTOR}.ppo_mini_batch_size"
        yield Mistake(
            key="trainer.n_gpus_per_node",
            text=f"must divide the rows of one update, {what} * {_ROLLOUT}.n = {rows // n} * {n} = {rows} "
            f"({rows} % {ranks} = {rows % ranks}); otherwise ranks would train on unequal shares",
            uses=(what, f"{_ROLLOUT}.n"),
        )
    if n == 1 and config.algorithm.adv_estimator == "grpo":
        yield Mistake(
            key=f"{_ROLLOUT}.n",
            text="must be ≥ 2 for algorithm.adv_estimator=grpo, got 1: a sample is compared with its group's mean, so "
            "every advantage would be 0",
            uses=("algorithm.adv_estimator",),
        )


def _lengths(config: RunConfig) -> Iterator[Mistake]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest = prompt + response
    sums = f"data.max_prompt_length + data.max_response_length = {prompt} + {response} = {longest}"
    uses = ("data.max_prompt_length", "data.max_response_length")
    limits = {
        f"{_ROLLOUT}.max_model_len": "no room would be left for the response",
        f"{_ACTOR}.ppo_max_token_len_per_gpu": "one sample would not fit into a micro-batch",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "one sample would not fit into a micro-batch",
    }
    for key, why in limits.items():
        value = _get(config, key)
        if isinstance(value, int) and 1 <= value < longest:
            yield Mistake(key=key, text=f"must be ≥ {sums}, got {value}; otherwise {why}", uses=uses)


def _log_probs(config: RunConfig) -> Iterator[Mistake]:
    """Sampled and recomputed log-probs must be of one kind: the trainer recomputes at temperature, untruncated."""
    rollout = config.actor_rollout_ref.rollout
    truncating = [
        (f"{_ROLLOUT}.top_p", rollout.top_p, 0 < rollout.top_p < 1, "1"),
        (f"{_ROLLOUT}.top_k", rollout.top_k, rollout.top_k is not None and rollout.top_k >= 1, "null"),
    ]
    old = config.actor_rollout_ref.actor.old_log_prob
    why = (
        "recomputed log-probs are those of the whole vocabulary, and not of the truncated one that was sampled from"
        if old == "recompute"
        else "log-probs of sampled tokens are those of the truncated vocabulary, and the ratio compares them with the "
        "trainer's, over the whole one"
    )
    for key, value, truncates, fix in truncating:
        if truncates:
            text = f"must be {fix} for training, got {value}: {why} ({_ACTOR}.old_log_prob={old})"
            yield Mistake(key=key, text=text, uses=(f"{_ACTOR}.old_log_prob",))


def _temperature(config: RunConfig) -> Iterator[Mistake]:
    rollout = config.actor_rollout_ref.rollout
    if 0 < rollout.temperature < MIN_TEMPERATURE:
        yield Mistake(
            key=f"{_ROLLOUT}.temperature",
            text=f"must be ≥ {MIN_TEMPERATURE:g}, got {rollout.temperature:g}: closer to 0 all samples of a group are "
            "the same, and nothing is learned from comparing them",
        )
    if 0 < rollout.val_kwargs.temperature < MIN_TEMPERATURE:
        yield Mistake(
            key=f"{_ROLLOUT}.val_kwargs.temperature",
            text=f"must be 0, which is greedy, or ≥ {MIN_TEMPERATURE:g}, got {rollout.val_kwargs.temperature:g}",
        )


def _optimizer(config: RunConfig) -> Iterator[Mistake]:
    warmup, steps = config.actor_rollout_ref.actor.optim.lr_warmup_steps, config.trainer.total_training_steps
    if part_of(config) in ("whole", "train_only") and steps is not None and 1 <= steps < warmup:
        yield Mistake(
            key=f"{_ACTOR}.optim.lr_warmup_steps",
            text=f"must be ≤ trainer.total_training_steps ({warmup} > {steps}); otherwise the learning rate never "
            f"reaches its value; for a run this short set {_ACTOR}.optim.lr_warmup_steps={steps // 10}",
            uses=("trainer.total_training_steps",),
        )


def _reward(config: RunConfig) -> Iterator[Mistake]:
    custom = config.reward.custom_reward_function
    if config.reward.name is None and custom.path is None and not config.data.rollout_files:
        yield Mistake(
            key="reward.name",
            text="is not set, and neither is reward.custom_reward_function.path: samples without a score cannot be "
            "trained on",
        )
    if config.reward.name is not None and custom.path is not None:
        yield Mistake(
            key="reward.name",
            text=f"is {config.reward.name!r} and reward.custom_reward_function.path is {custom.path!r}: choose one",
            uses=("reward.custom_reward_function.path",),
        )
    limit, sample_limit = config.reward.limit_s, config.actor_rollout_ref.rollout.agent.sample_limit_s
    if 0 < sample_limit < limit <= MAX_SECONDS:
        yield Mistake(
            key="reward.limit_s",
            text=f"must be ≤ {_ROLLOUT}.agent.sample_limit_s ({limit:g} > {sample_limit:g}), which includes the reward",
            uses=(f"{_ROLLOUT}.agent.sample_limit_s",),
        )


def _tracking(config: RunConfig) -> Iterator[Mistake]:
    twice = [name for name, count in Counter(config.trainer.logger).items() if count > 1]
    if twice:
        text = f"names {', '.join(map(repr, twice))} more than once: two would write the same files; name each once"
        yield Mistake(key="trainer.logger", text=text)


def _validation(config: RunConfig) -> Iterator[Mistake]:
    every = config.trainer.test_freq
    if every != -1 and every < 1:
        yield Mistake(key="trainer.test_freq", text=f"must be ≥ 1, or -1 for only first and last, got {every}")
    elif every != -1 and not config.data.val_files:
        yield Mistake(
            key="trainer.test_freq",
            text=f"is {every}, and data.val_files is empty: there is nothing to validate on",
            uses=("data.val_files",),
        )


def check_files(config: RunConfig, *, prepared: Path | None = None) -> list[Mistake]:
    """Return the files and folders that are not there, or cannot be data; those that `prepared` will hold are there."""
    made = config.prepare is not None and prepared is not None
    found: list[Mistake] = []
    trains = config.data.train_files if part_of(config) in READ_TRAIN_FILES else ()
    for key, files in (
        ("data.train_files", trains),
        ("data.val_files", config.data.val_files),
        ("data.rollout_files", config.data.rollout_files),
    ):
        for file in map(Path, files):
            if not file.is_file() and not (made and prepared in file.parents):
                found.append(Mistake(key=key, text=f"no such file: {file}"))
            elif key != "data.rollout_files" and file.suffix not in KINDS:
                found.append(Mistake(key=key, text=unknown_kind(file)))
    model = Path(config.actor_rollout_ref.model.path)
    named = bool(config.actor_rollout_ref.model.path) and not (made and prepared in model.parents)
    if named and not (model / "config.json").is_file():
        text = f"no Hugging Face folder (with a config.json): {model}"
        found.append(Mistake(key="actor_rollout_ref.model.path", text=text))
    return found
