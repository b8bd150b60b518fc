"""Dense rows, micro-batch plans, and the choice of rows of an update."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_cases import make_batch, make_sample

from verl_contracts.errors import DataError, StateError
from verl_contracts.tokens import RAW, VersionSpan
from verl_contracts.training import AdvantageInputs, TrainSample
from verl_trainers.advantages.grpo import GroupRelative
from verl_trainers.config.schema import ActorConfig
from verl_trainers.workers.batch import build_rows, estimate_advantages, plan_micro_batches
from verl_trainers.workers.update import Update, plan_updates


def _updates(samples: list[TrainSample], actor: ActorConfig) -> tuple[Update, ...]:
    rows = build_rows(samples, version=0, temperature=1.0)
    advantages = estimate_advantages(GroupRelative(norm_by_std=False), samples, rows)
    return plan_updates(samples, rows, advantages, actor=actor, reference_budget=None, rank=0, ranks=1)


def test_rows_are_padded_on_the_right() -> None:
    samples = [
        make_sample(uid="a", sample=0, score=0.0, ids=[3, 4, 5], prompt=1, logprobs=[0.0, -0.5, -0.25]),
        make_sample(uid="a", sample=1, score=1.0, ids=[6, 7], prompt=1, logprobs=[0.0, -1.0], version=2),
    ]
    rows = build_rows(samples, version=2, temperature=1.0)
    assert rows.ids.tolist() == [[3, 4, 5], [6, 7, 0]]
    assert rows.mask.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert rows.sampled_logprobs.tolist() == [[0, -0.5, -0.25], [0, -1, 0]]
    assert rows.pure.tolist() == [[0, 1, 1], [0, 1, 0]]
    assert rows.current.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert rows.lengths.tolist() == [3, 2]


def test_mixed_cache_is_not_pure() -> None:
    sample = make_sample(uid="a", sample=0, score=0.0, ids=[3, 4, 5], prompt=1)
    spans = (
        VersionSpan(version=1, kv_version=1, start=1, end=2),
        VersionSpan(version=2, kv_version=1, start=2, end=3),
    )
    sample = dataclasses.replace(sample, trajectories=(dataclasses.replace(sample.trajectories[0], spans=spans),))
    assert build_rows([sample], version=1, temperature=1.0).pure.tolist() == [[0, 1, 0]]


def test_estimator_sees_one_row_per_sample_when_agents_restart() -> None:
    """A sample of two trajectories weighs once in its group's mean, and its advantage covers both."""
    one, two = make_batch(groups=1, n=2)
    longer = dataclasses.replace(one, trajectories=(*one.trajectories, *two.trajectories))
    samples = [
        dataclasses.replace(longer, row=dataclasses.replace(one.row, score=0.0)),
        dataclasses.replace(two, row=dataclasses.replace(two.row, score=1.0)),
    ]
    rows = build_rows(samples, version=0, temperature=1.0)
    advantages = estimate_advantages(GroupRelative(norm_by_std=False), samples, rows)
    assert torch.equal(advantages, rows.mask * torch.tensor([[-0.5], [-0.5], [0.5]]))


class PerRow:
    """An estimator that forgets the positions."""

    def estimate(self, inputs: AdvantageInputs, /) -> torch.Tensor:
        return inputs.scores


def test_estimate_of_another_shape_is_refused() -> None:
    samples = make_batch(groups=1, n=2)
    rows = build_rows(samples, version=0, temperature=1.0)
    with pytest.raises(StateError, match=r"PerRow\.estimate must return \(2, \d+\).*returned \(2,\)"):
        estimate_advantages(PerRow(), samples, rows)


def test_unusable_rows_are_refused_by_name() -> None:
    good = make_sample(uid="0-3-0", sample=2, score=0.0, ids=[1, 2, 3], prompt=1)
    with pytest.raises(DataError, match="sample 2 of group 0-3-0 has no trajectory"):
        build_rows([dataclasses.replace(good, trajectories=())], version=0, temperature=1.0)
    raw = dataclasses.replace(good.trajectories[0], logprob_kind=RAW)
    assert build_rows([dataclasses.replace(good, trajectories=(raw,))], version=0, temperature=1.0)
    with pytest.raises(DataError, match=r"kind 'raw'.*temperature 0\.7"):
        build_rows([dataclasses.replace(good, trajectories=(raw,))], version=0, temperature=0.7)
    first = make_sample(uid="a", sample=0, score=0.0, ids=[1, 2], prompt=0)
    with pytest.raises(DataError, match="position 0"):
        build_rows([first], version=0, temperature=1.0)
    with pytest.raises(DataError, match="at least one sample"):
        build_rows([], version=0, temperature=1.0)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    budget=st.integers(1, 200),
    ranks=st.integers(1, 4),
    chosen=st.integers(0, 40),
)
def test_plan_holds_each_row_once_within_the_budget(lengths: list[int], budget: int, ranks: int, chosen: int) -> None:
    sizes = np.array(lengths)
    rows = np.arange(min(chosen, len(lengths)))
    plans = plan_micro_batches(rows, sizes, budget=budget, ranks=ranks)
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) >= 1
    seen: list[int] = []
    for plan in plans:
        for micro in plan:
            padded = len(micro.rows) * int(sizes[micro.rows].max())
            assert padded <= budget or len(micro.rows) == 1
            seen += micro.rows.tolist() if micro.live else []
    assert sorted(seen) == rows.tolist()


def test_zero_advantage_rows_are_left_out_and_still_counted() -> None:
    samples = make_batch(groups=3, n=2)
    samples = [dataclasses.replace(s, row=dataclasses.replace(s.row, score=0.5)) for s in samples[:2]] + samples[2:]
    rows = build_rows(samples, version=0, temperature=1.0)
    (update,) = _updates(samples, ActorConfig())
    assert update.zero_rows == 2
    assert sorted(row for micro in update.micro_batches for row in micro.rows) == [2, 3, 4, 5]
    assert update.counts.tokens == float(rows.mask.sum())
    assert update.counts.sequences == 6
    assert update.computed_tokens == float(rows.mask[2:].sum())
    for needs_all in (ActorConfig(entropy_coeff=0.1), ActorConfig(use_kl_loss=True)):
        (update,) = _updates(samples, needs_all)
        assert update.zero_rows == 2
        assert sum(len(micro.rows) for micro in update.micro_batches) == 6


def test_mini_batches_are_whole_groups() -> None:
    updates = _updates(make_batch(groups=5, n=3), ActorConfig(ppo_mini_batch_size=2))
    assert [[int(row) for micro in update.micro_batches for row in micro.rows] for update in updates] == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 13, 14],
    ]


def test_groups_without_a_trained_token_are_an_error() -> None:
    sample = make_sample(uid="0-9-0", sample=0, score=1.0, ids=[1, 2, 3], prompt=1, mask=[0, 0, 0])
    with pytest.raises(DataError, match=r"\['0-9-0'\] have no token to train on"):
        _updates([sample], ActorConfig())
