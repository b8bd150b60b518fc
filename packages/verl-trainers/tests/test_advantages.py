"""Group-relative advantages, degenerate groups above all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_contracts.errors import ConfigError, DataError
from verl_contracts.plugins import families, load_plugin
from verl_contracts.training import AdvantageInputs
from verl_trainers.advantages.grpo import GroupRelative
from verl_trainers.config.schema import AlgorithmConfig
from verl_trainers.workers.algorithm import build_estimator


def _estimate(estimator: GroupRelative, scores: list[float], groups: list[int]) -> list[float]:
    mask = torch.ones(len(scores), 1)
    inputs = AdvantageInputs(scores=torch.tensor(scores), groups=torch.tensor(groups), mask=mask)
    return [float(value) for value in estimator.estimate(inputs).flatten()]


def test_mean_is_subtracted_when_not_normalized() -> None:
    got = _estimate(GroupRelative(norm_by_std=False), [1.0, 0.0, 0.5, 4.0, 8.0], [7, 7, 7, 2, 2])
    assert got == pytest.approx([0.5, -0.5, 0.0, -2.0, 2.0])


def test_deviation_has_n_minus_one_when_normalized() -> None:
    got = _estimate(GroupRelative(), [1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0])
    std = (4 * 0.25 / 3) ** 0.5
    assert got == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std], rel=1e-5)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_and_single_groups_are_exactly_zero(norm_by_std: bool) -> None:
    scores = [0.1, 0.1, 0.1, 0.7, 1 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3]
    got = _estimate(GroupRelative(norm_by_std=norm_by_std), scores, [0, 0, 0, 1, 2, 2, 2, 2, 2])
    assert got == [0.0] * 9


def test_masked_positions_are_zero_and_the_rest_repeats() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    inputs = AdvantageInputs(scores=torch.tensor([2.0, 0.0]), groups=torch.tensor([0, 0]), mask=mask)
    got = GroupRelative(norm_by_std=False).estimate(inputs)
    assert got.dtype == torch.float32
    assert got.tolist() == [[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.floats(-1e3, 1e3, width=32)),
        min_size=1,
        max_size=24,
    ),
    norm_by_std=st.booleans(),
)
def test_order_of_rows_changes_nothing(rows: list[tuple[int, float]], norm_by_std: bool) -> None:
    estimator = GroupRelative(norm_by_std=norm_by_std)
    torch.manual_seed(len(rows))
    order: list[int] = torch.randperm(len(rows)).tolist()
    straight = _estimate(estimator, [score for _, score in rows], [group for group, _ in rows])
    shuffled = _estimate(estimator, [rows[i][1] for i in order], [rows[i][0] for i in order])
    assert all(abs(value) < float("inf") for value in straight)
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-4, abs=1e-4)


def test_scores_that_are_not_finite_are_refused_by_row() -> None:
    with pytest.raises(DataError, match=r"rows \[1\]"):
        _estimate(GroupRelative(), [0.0, float("nan")], [0, 0])


def test_epsilon_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        GroupRelative(epsilon=0.0)


def test_entry_point_meets_the_contract_and_takes_its_keys() -> None:
    assert load_plugin(families.ADVANTAGE_ESTIMATOR, "grpo", key="algorithm.adv_estimator") is GroupRelative
    built = build_estimator(AlgorithmConfig(norm_adv_by_std_in_grpo=False, options={"epsilon": 1e-3}))
    assert isinstance(built, GroupRelative)
    assert _estimate(built, [1.0, 0.0], [0, 0]) == [0.5, -0.5]


def test_unknown_and_repeated_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.options\.epsilom: unknown option; nearest: 'epsilon'"):
        build_estimator(AlgorithmConfig(options={"epsilom": 1.0}))
    with pytest.raises(ConfigError, match="norm_adv_by_std_in_grpo"):
        build_estimator(AlgorithmConfig(options={"norm_by_std": True}))


class Plain:
    """An estimator from outside that knows no deviation."""

    def estimate(self, inputs: AdvantageInputs, /) -> torch.Tensor:
        return inputs.scores.unsqueeze(1) * inputs.mask


def test_key_that_the_estimator_does_not_take_is_refused_unless_default() -> None:
    path = f"{__name__}:Plain"
    assert isinstance(build_estimator(AlgorithmConfig(adv_estimator=path)), Plain)
    with pytest.raises(ConfigError, match=r"norm_adv_by_std_in_grpo = False has no effect: Plain"):
        build_estimator(AlgorithmConfig(adv_estimator=path, norm_adv_by_std_in_grpo=False))
