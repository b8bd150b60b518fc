"""Whole training steps against TRL, another trainer on the same machine: same model, data, batch, lengths and type.

Each run is a process of its own, since both sides keep threads, caches and, with Ray, other processes. Speeds are those
of the steps after warming up, from the end of one step to the end of another, so nothing of a step is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from bench.core import BenchError, Row, Target
from bench.mended import MENDED
from bench.turns import middle, ratios, take_turns
from bench.work import Work, check_same_work, run_trl, run_verl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.core import Benchmark, Conditions
    from bench.work import Speed

__all__ = ["BENCHMARKS"]

TRL = "trl"
EVERY_ROW = "every_row_computed"
COMPUTE_ALL = "actor_rollout_ref.actor.entropy_coeff=1e-12"
"""An entropy bonus needs every row, so none is skipped; this one is too small to change anything."""
SYNC_ON_BOTH = ("trainer.mode=sync", "async_training.max_staleness=null", "runtime=ray", "trainer.n_gpus_per_node=2")
LEAVES_OUT = "starting, loading and validating; how fast either side learns"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersusTrl:
    """Samples per second of `verl-train` over those of TRL."""

    name: str
    target: Target
    work: Callable[[Conditions], Work]
    """Prepares data and says what is trained."""
    sides: Mapping[str, tuple[str, ...]]
    """Ours: name → overrides. The first is the claim: on the toy the one in one process, as the baseline is."""
    threads: tuple[int, ...]
    """Of TRL: what it is tried with. In each pair the faster one is the baseline."""
    micro_batch: int
    """Rows of one forward and backward pass of TRL; the fastest of those tried."""
    length_tolerance: float
    """Relative; more than chance explains."""
    baseline: str | None = "samples per second of TRL's GRPOTrainer, one process"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Let all sides take turns."""
        release = _trl_version()
        work = self.work(conditions)
        runs: dict[str, Callable[[], Speed]] = {
            side: partial(run_verl, work, conditions.folder / side, *overrides)
            for side, overrides in self.sides.items()
        }
        tries = {f"{TRL}_{count}_threads": count for count in self.threads}
        for name, count in tries.items():
            runs[name] = partial(run_trl, work, threads=count, micro_batch=self.micro_batch)
        found = take_turns(runs, rounds=conditions.pairs)
        found[TRL] = [
            max(pair, key=lambda speed: speed.samples_per_s)
            for pair in zip(*(found[name] for name in tries), strict=True)
        ]
        for side in self.sides:
            check_same_work(found[side], found[TRL], tolerance=self.length_tolerance)
        rows = [self._ratio(side, found, work, release) for side in self.sides]
        if EVERY_ROW in self.sides:
            rows += _skipping(self.name, found[next(iter(self.sides))], found[EVERY_ROW])
        for side, speeds in found.items():
            rows.append(_plain(f"{self.name}/{side}/speed", [s.samples_per_s for s in speeds], "samples/s"))
            rows.append(_plain(f"{self.name}/{side}/length", [s.response_tokens for s in speeds], "tokens"))
            rows.append(_plain(f"{self.name}/{side}/reward", [s.reward for s in speeds], ""))
        return tuple(rows)

    def _ratio(self, side: str, found: Mapping[str, Sequence[Speed]], work: Work, release: str) -> Row:
        values = ratios(*([speed.samples_per_s for speed in found[key]] for key in (side, TRL)))
        figure, spread = middle(values)
        first = side == next(iter(self.sides))
        return Row(
            name=self.name if first else f"{self.name}/{side}",
            figure=figure,
            spread=spread,
            count=len(values),
            baseline=self.baseline,
            target=self.target if first else None,
            settings=(
                f"{work.recipe}, {work.groups} prompts x {work.n}, at most {work.max_tokens} tokens, {work.dtype}, "
                f"steps {work.warm_up + 1} to {work.steps}; ours: {' '.join(self.sides[side])}; TRL {release}: "
                f"{' or '.join(map(str, self.threads))} threads, the faster in each pair, generate over the whole "
                f"batch, micro-batches of {self.micro_batch}, no logging, saving, reference model or gradient "
                f"checkpointing, reward called in its process, {MENDED}"
            ),
            leaves_out=LEAVES_OUT,
        )


def _skipping(name: str, ours: Sequence[Speed], computing_all: Sequence[Speed]) -> list[Row]:
    """Return how much of our speed comes from not computing rows whose advantage is 0, and how many these are."""
    share = [
        1.0 - all_rows.samples_per_s / mine.samples_per_s for mine, all_rows in zip(ours, computing_all, strict=True)
    ]
    return [
        _plain(f"{name}/share_from_skipping", share, ""),
        _plain(f"{name}/rows_skipped", [speed.untrained for speed in ours], ""),
    ]


def _plain(name: str, values: list[float], unit: str) -> Row:
    figure, spread = middle(values)
    return Row(name=name, figure=figure, spread=spread, count=len(values), unit=unit, leaves_out="see the claim")


def _trl_version() -> str:
    try:
        return version(TRL)
    except PackageNotFoundError:
        raise BenchError("TRL is the baseline and is not installed here; use `tools/nox -s bench`") from None


def _toy(conditions: Conditions) -> Work:
    """Return the quickstart, with a learning rate at which the policy, and so the lengths, stay as they begin."""
    from verl_trainers.recipes import toy

    folder = conditions.folder / "toy"
    toy.prepare(folder)
    return Work(
        recipe="quickstart",
        model=str(folder / "model"),
        train_file=str(folder / "train.jsonl"),
        reward="verl_trainers.rewards.builtin:CopyReward",
        groups=16,
        n=8,
        max_tokens=5,
        dtype="float32",
        learning_rate=1e-6,
        clip_high=0.28,
        entropy=0.02,
        scale_rewards="none",
        steps=60,
        warm_up=20,
    )


def _arithmetic(conditions: Conditions) -> Work:
    """Return the first steps of the arithmetic recipe, at its learning rate."""
    from verl_trainers.recipes import arithmetic

    if not conditions.smollm2.exists():
        raise BenchError(f"{conditions.smollm2} is not there; make it: python tools/make_smollm2.py models/smollm2")
    folder = conditions.folder / "arithmetic"
    arithmetic.prepare(folder)
    return Work(
        recipe="smollm2_arithmetic",
        model=str(conditions.smollm2.resolve()),
        train_file=str(folder / "train.jsonl"),
        reward="verl_trainers.rewards.builtin:LastNumber",
        groups=8,
        n=8,
        max_tokens=16,
        dtype="bfloat16",
        learning_rate=4e-5,
        clip_high=0.28,
        entropy=0.0,
        scale_rewards="group",
        steps=5,
        warm_up=1,
    )


BENCHMARKS: tuple[Benchmark, ...] = (
    VersusTrl(
        name="sync_vs_trl_tiny",
        target=Target(limit=0.8),
        work=_toy,
        sides={
            "local": ("trainer.mode=sync", "runtime=local"),
            "ray": ("trainer.mode=sync", "runtime=ray"),
        },
        threads=(1, 2),
        micro_batch=128,
        length_tolerance=0.05,
    ),
    VersusTrl(
        name="async_vs_trl_tiny",
        target=Target(limit=1.0),
        work=_toy,
        sides={
            "local": ("trainer.mode=fully_async", "runtime=local"),
            "ray": ("trainer.mode=fully_async", "runtime=ray"),
        },
        threads=(1, 2),
        micro_batch=128,
        length_tolerance=0.05,
    ),
    VersusTrl(
        name="sync_vs_trl_smollm2",
        target=Target(limit=1.0),
        work=_arithmetic,
        sides={
            "ray": SYNC_ON_BOTH,
            EVERY_ROW: (*SYNC_ON_BOTH, COMPUTE_ALL),
        },
        threads=(2,),
        micro_batch=16,
        length_tolerance=0.1,
    ),
)
