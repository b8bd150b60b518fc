"""The same training on both sides of a trainer row: what it is, and how fast `verl-train` does it.

`trl_side` does it with TRL. Both report mean length and mean reward beside their speed, and a pair whose lengths differ
is refused: it would compare different work.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from bench.core import BenchError
from bench.processes import answer_of, run_python

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Speed", "Work", "check_same_work", "run_trl", "run_verl"]

LIMIT_S = 1800.0
"""Longest that one run may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained, and how. All of it is JSON."""

    recipe: str
    """Recipe of `verl-train` that it follows; what is not said here is as there."""
    model: str
    """Folder."""
    train_file: str
    """JSON lines in verl's columns."""
    reward: str
    """``module:Class`` of a `RewardFunction`; it is called directly, in the trainer's process."""
    groups: int
    n: int
    """Samples in a group."""
    max_tokens: int
    """Of a response."""
    dtype: Literal["float32", "bfloat16"]
    """Of the weights, of generation and of training."""
    learning_rate: float
    """Constant."""
    clip_high: float
    """Upper clip ratio; the lower one is 0.2."""
    entropy: float
    """Coefficient of the entropy bonus."""
    scale_rewards: Literal["group", "none"]
    """Whether advantages are divided by their group's standard deviation."""
    steps: int
    warm_up: int
    """Steps at the start that are not counted."""

    @property
    def counted(self) -> int:
        """Samples in the steps that count."""
        return (self.steps - self.warm_up) * self.groups * self.n

    def to_json(self) -> dict[str, object]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast one run was, and what it did in the steps that count."""

    samples_per_s: float
    response_tokens: float
    """Mean length of a response."""
    reward: float
    """Mean."""
    untrained: float = 0.0
    """Part of the samples whose advantage was 0."""


def run_verl(work: Work, folder: Path, *overrides: str) -> Speed:
    """Train with `verl-train` in processes of its own; `overrides` say mode, runtime and devices."""
    settings = (
        "prepare=null",
        f"data.train_files=[{work.train_file}]",
        "data.val_files=[]",
        f"data.train_batch_size={work.groups}",
        f"data.max_response_length={work.max_tokens}",
        f"actor_rollout_ref.model.path={work.model}",
        f"actor_rollout_ref.actor.fsdp_config.model_dtype={work.dtype}",
        f"actor_rollout_ref.actor.clip_ratio_high={work.clip_high}",
        f"actor_rollout_ref.actor.entropy_coeff={work.entropy}",
        f"actor_rollout_ref.actor.optim.lr={work.learning_rate}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        f"actor_rollout_ref.rollout.n={work.n}",
        f"actor_rollout_ref.rollout.dtype={work.dtype}",
        f"actor_rollout_ref.rollout.max_num_seqs={work.groups * work.n}",
        f"algorithm.norm_adv_by_std_in_grpo={str(work.scale_rewards == 'group').lower()}",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={work.steps}",
    )
    command = ["-m", "verl_trainers.cli", "run", work.recipe, "--out", str(folder), "--overwrite"]
    run_python([*command, *settings, *overrides], limit_s=LIMIT_S)
    return read_speed(folder / "metrics.jsonl", work)


def read_speed(metrics: Path, work: Work) -> Speed:
    """Return the speed from the times at which steps ended."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = {row["step"]: row for row in rows if "samples_per_s" in row}
    if sorted(steps) != list(range(1, work.steps + 1)):
        raise BenchError(f"{metrics} should hold steps 1 to {work.steps}, and holds {sorted(steps)}")
    counted = [steps[step] for step in range(work.warm_up + 1, work.steps + 1)]

    def mean(name: str) -> float:
        return sum(float(row[name]) for row in counted) / len(counted)

    return Speed(
        samples_per_s=work.counted / (steps[work.steps]["time"] - steps[work.warm_up]["time"]),
        response_tokens=mean("response_length/mean"),
        reward=mean("reward"),
        untrained=mean("actor/zero_advantage_rows") / (work.groups * work.n),
    )


def run_trl(work: Work, *, threads: int, micro_batch: int) -> Speed:
    """Train with TRL in a process of its own."""
    question = {**work.to_json(), "threads": threads, "micro_batch": micro_batch}
    return Speed(**answer_of("bench.trl_side", question, limit_s=LIMIT_S))


def check_same_work(ours: Sequence[Speed], theirs: Sequence[Speed], *, tolerance: float) -> None:
    """Raise `BenchError` when mean lengths differ by more than `tolerance`, relatively."""
    mine, other = (sum(speed.response_tokens for speed in side) / len(side) for side in (ours, theirs))
    if abs(mine / other - 1.0) > tolerance:
        raise BenchError(
            f"responses have {mine:.2f} tokens here and {other:.2f} there, more than {tolerance:.0%} apart: the two "
            "sides did not do the same work"
        )
