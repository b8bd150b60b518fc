"""Rows of tokens as dense tensors, and how they are cut into micro-batches.

Owns the layout: one row is one trajectory, padded on the right, so a causal model needs no attention mask and a row's
numbers do not depend on its neighbours' lengths. Planning happens on the host, from lengths alone, and every rank makes
the same plan for all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from verl_contracts.errors import DataError, StateError
from verl_contracts.tokens import SAMPLED
from verl_contracts.training import AdvantageInputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from verl_contracts.samples import Trajectory
    from verl_contracts.training import AdvantageEstimator, TrainSample

__all__ = ["MicroBatch", "RowBatch", "build_rows", "estimate_advantages", "plan_micro_batches"]

N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """All rows of a step. B rows, T positions, on the host."""

    ids: torch.Tensor
    """[B, T] int64, 0 in the padding."""
    mask: torch.Tensor
    """[B, T] float32, 1 at trained positions."""
    sampled_logprobs: torch.Tensor
    """[B, T] float32, as the replica sampled."""
    pure: torch.Tensor
    """[B, T] float32, 1 where weights and cache had one version: only there may log-probs be compared."""
    current: torch.Tensor
    """[B, T] float32, 1 where that version is the present policy's."""
    lengths: npt.NDArray[np.int64]
    """[B]"""
    trained: npt.NDArray[np.bool_]
    """[B, T], `mask` for the host."""
    sample: npt.NDArray[np.int64]
    """[B], index of the sample that a row belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model at once."""

    rows: npt.NDArray[np.int64]
    live: bool = True
    """False for a filler, which only keeps a rank in step with the others and contributes nothing."""


def build_rows(samples: Sequence[TrainSample], *, version: int, temperature: float) -> RowBatch:
    """Lay the trajectories of `samples` out, in order.

    Args:
        samples: Each with at least one trajectory.
        version: Of the policy that is about to be trained.
        temperature: At which log-probs are computed, for checking that the sampled ones are of the same kind.
    """
    rows = [trajectory for sample in samples for trajectory in sample.trajectories]
    for sample in samples:
        _check(sample, temperature)
    if not rows:
        raise DataError("a step needs at least one sample, got none")
    lengths = np.fromiter((len(row.ids) for row in rows), dtype=np.int64, count=len(rows))
    width = int(lengths.max())
    real = np.arange(width) < lengths[:, None]
    total = int(lengths.sum())
    trained = _dense((row.loss_mask for row in rows), real, total, np.bool_)
    pure = np.zeros((len(rows), width), dtype=np.float32)
    current = np.zeros_like(pure)
    for index, row in enumerate(rows):
        for span in row.spans:
            if span.version == span.kv_version:
                pure[index, span.start : span.end] = 1.0
                if span.version == version:
                    current[index, span.start : span.end] = 1.0
    counts = [len(sample.trajectories) for sample in samples]
    return RowBatch(
        ids=torch.from_numpy(_dense((row.ids for row in rows), real, total, np.int64)),
        mask=torch.from_numpy(trained.astype(np.float32)),
        sampled_logprobs=torch.from_numpy(
            _dense((row.logprobs for row in rows), real, total, np.float32),
        ),
        pure=torch.from_numpy(pure),
        current=torch.from_numpy(current),
        lengths=lengths,
        trained=trained,
        sample=np.repeat(np.arange(len(samples)), counts),
    )


def estimate_advantages(estimator: AdvantageEstimator, samples: Sequence[TrainSample], rows: RowBatch) -> torch.Tensor:
    """Return [B, T]. The estimator compares samples: to it, one with several trajectories is one long row."""
    groups = {uid: number for number, uid in enumerate(dict.fromkeys(sample.row.uid for sample in samples))}
    scores = torch.tensor([sample.row.score for sample in samples], dtype=torch.float32)
    numbers = torch.tensor([groups[sample.row.uid] for sample in samples], dtype=torch.int64)
    if len(samples) == len(rows.lengths):
        return _estimate(estimator, AdvantageInputs(scores=scores, groups=numbers, mask=rows.mask))
    width = rows.mask.shape[1]
    first = np.searchsorted(rows.sample, rows.sample)
    place = np.arange(len(rows.sample)) - first
    mask = torch.zeros(len(samples), int(place.max()) + 1, width)
    mask[rows.sample, place] = rows.mask
    estimated = _estimate(estimator, AdvantageInputs(scores=scores, groups=numbers, mask=mask.flatten(1)))
    return estimated.view_as(mask)[rows.sample, place]


def plan_micro_batches(
    rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], *, budget: int, ranks: int = 1
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Cut `rows` into micro-batches for each rank: as many for one rank as for any other.

    Rows are dealt in order of length, so that ranks get equal work and padding is small. A micro-batch holds at most
    `budget` tokens, padding included; a row is never split, and one that is longer by itself goes alone. Ranks that run
    out get fillers, made of the longest of all rows.
    """
    longest = int(lengths.argmax())
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    plans: list[list[MicroBatch]] = []
    for rank in range(ranks):
        own = ordered[rank::ranks]
        plan: list[MicroBatch] = []
        start = 0
        while start < len(own):
            fit = max(1, budget // int(lengths[own[start]]))
            plan.append(MicroBatch(rows=np.sort(own[start : start + fit])))
            start += fit
        plans.append(plan)
    most = max(1, *(len(plan) for plan in plans))
    filler = MicroBatch(rows=np.array([longest]), live=False)
    return tuple(tuple(plan + [filler] * (most - len(plan))) for plan in plans)


def _estimate(estimator: AdvantageEstimator, inputs: AdvantageInputs) -> torch.Tensor:
    advantages = estimator.estimate(inputs)
    if advantages.shape != inputs.mask.shape:
        raise StateError(
            f"{type(estimator).__qualname__}.estimate must return {tuple(inputs.mask.shape)}, one a position; "
            f"it returned {tuple(advantages.shape)}"
        )
    return advantages


def _check(sample: TrainSample, temperature: float) -> None:
    where = f"sample {sample.row.sample} of group {sample.row.uid}"
    if not sample.trajectories:
        raise DataError(f"{where} has no trajectory; an unusable sample must not reach the step")
    for trajectory in sample.trajectories:
        _check_trajectory(trajectory, where, temperature)


def _check_trajectory(trajectory: Trajectory, where: str, temperature: float) -> None:
    if len(trajectory.ids) < 2:
        raise DataError(f"{where} has a trajectory of {len(trajectory.ids)} tokens; at least 2 are needed")
    if trajectory.loss_mask[0]:
        raise DataError(f"{where} trains position 0, which nothing precedes; prompts must hold at least one token")
    if trajectory.logprob_kind != SAMPLED and temperature != 1.0:
        raise DataError(
            f"{where} carries log-probs of kind {trajectory.logprob_kind!r}, and the step computes them at temperature "
            f"{temperature}; ask the replica for kind {SAMPLED!r}"
        )


def _dense(rows: Iterable[Sequence[float]], real: npt.NDArray[np.bool_], total: int, dtype: type[N]) -> npt.NDArray[N]:
    """Return [B, T] with the rows' values where `real`, zeros elsewhere."""
    out = np.zeros(real.shape, dtype=dtype)
    out[real] = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=total)
    return out
