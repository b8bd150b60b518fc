# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of `AdvantageEstimator` and `PolicyLoss`: shapes, masks, purity, and no look across groups.

Needs torch.
"""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, get_args

import pytest

from verl_contracts.plugins import check_plugin, families
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.training import AdvantageInputs, LossAggregation, PolicyLossInputs

if TYPE_CHECKING:
    import torch

    from verl_contracts.training import AdvantageEstimator, PolicyLoss
else:
    torch = pytest.importorskip("torch")

__all__ = ["AdvantageEstimatorSuite", "PolicyLossSuite"]

_SCORES = (0.0, 1.0, 0.5, 1.0, 0.25, 0.75, 3.0)
_GROUPS = (7, 7, 7, 2, 2, 2, 5)
"""Two groups of three and one of one; the numbers are in no order."""


def _inputs() -> AdvantageInputs:
    mask = torch.ones(len(_SCORES), 6)
    mask[:, :2] = 0.0
    mask[1, 4:] = 0.0
    mask[4, :] = 0.0
    return AdvantageInputs(scores=torch.tensor(_SCORES), groups=torch.tensor(_GROUPS), mask=mask)


class AdvantageEstimatorSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `estimator`."""

    compares_within_groups: ClassVar[bool] = True
    """Whether advantages are relative to the group: equal scores then give 0."""

    @abc.abstractmethod
    def estimator(self) -> AdvantageEstimator:
        """Return an estimator."""

    def test_class_meets_the_contract(self) -> None:
        check_plugin(families.ADVANTAGE_ESTIMATOR, type(self.estimator()), key="algorithm.adv_estimator")

    def test_shape_type_and_mask_are_right(self) -> None:
        inputs = _inputs()
        result = self.estimator().estimate(inputs)
        assert result.shape == inputs.mask.shape
        assert result.dtype == torch.float32
        assert bool(torch.isfinite(result).all())
        assert bool((result[inputs.mask == 0] == 0).all())

    def test_inputs_are_not_changed(self) -> None:
        inputs, same = _inputs(), _inputs()
        self.estimator().estimate(inputs)
        for name in ("scores", "groups", "mask"):
            assert torch.equal(getattr(inputs, name), getattr(same, name)), name

    def test_result_is_repeatable(self) -> None:
        estimator = self.estimator()
        assert torch.equal(estimator.estimate(_inputs()), estimator.estimate(_inputs()))

    def test_order_of_rows_does_not_matter(self) -> None:
        inputs = _inputs()
        order = torch.tensor([3, 0, 6, 5, 1, 4, 2])
        shuffled = AdvantageInputs(scores=inputs.scores[order], groups=inputs.groups[order], mask=inputs.mask[order])
        straight = self.estimator().estimate(inputs)
        assert torch.allclose(self.estimator().estimate(shuffled), straight[order], atol=1e-6)

    def test_better_score_never_gets_the_smaller_advantage(self) -> None:
        result = self.estimator().estimate(_inputs())
        assert float(result[1, 2]) > float(result[2, 2]) > float(result[0, 2])

    def test_groups_do_not_see_each_other(self) -> None:
        if not self.compares_within_groups:
            pytest.skip("the estimator declares that it compares over the batch")
        inputs = _inputs()
        other = inputs.scores.clone()
        other[3:] += 100.0
        changed = self.estimator().estimate(replace(inputs, scores=other))
        assert torch.equal(changed[:3], self.estimator().estimate(inputs)[:3])

    @pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -3.0, 1e6])
    @pytest.mark.parametrize("size", [1, 2, 8])
    def test_equal_scores_say_nothing(self, score: float, size: int) -> None:
        if not self.compares_within_groups:
            pytest.skip("the estimator declares that it compares over the batch")
        inputs = AdvantageInputs(
            scores=torch.full((size,), score), groups=torch.zeros(size, dtype=torch.int64), mask=torch.ones(size, 3)
        )
        advantages = self.estimator().estimate(inputs)
        assert torch.equal(advantages, torch.zeros(size, 3)), f"equal scores must give exactly 0, got {advantages}"


class PolicyLossSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `loss`."""

    plain_gradient_at_ratio_one: ClassVar[bool] = True
    """Whether the gradient is that of the plain policy gradient where the policies agree, as with clipped ratios."""

    @abc.abstractmethod
    def loss(self) -> PolicyLoss:
        """Return a loss."""

    def _loss_inputs(self, *, shift: float = 0.1) -> PolicyLossInputs:
        generator = torch.Generator().manual_seed(3)
        old = -torch.rand(4, 5, generator=generator) - 0.1
        mask = torch.ones(4, 5)
        mask[:, 0] = 0.0
        mask[2, 3:] = 0.0
        return PolicyLossInputs(
            logprobs=(old + shift * torch.randn(4, 5, generator=generator)).requires_grad_(),
            old_logprobs=old,
            advantages=torch.tensor([1.0, -1.0, 0.5, 0.0]).unsqueeze(1) * mask,
            mask=mask,
        )

    def test_class_meets_the_contract(self) -> None:
        check_plugin(families.POLICY_LOSS, type(self.loss()), key="actor_rollout_ref.actor.policy_loss")
        assert self.loss().aggregation in get_args(LossAggregation)

    def test_losses_are_finite_and_by_token(self) -> None:
        inputs = self._loss_inputs()
        output = self.loss().losses(inputs)
        assert output.losses.shape == inputs.mask.shape
        assert bool(torch.isfinite(output.losses).all())
        for name, values in output.metrics.items():
            assert values.shape == inputs.mask.shape, name

    def test_gradient_at_ratio_one_is_that_of_the_policy_gradient(self) -> None:
        if not self.plain_gradient_at_ratio_one:
            pytest.skip("the loss declares another gradient at ratio one")
        inputs = self._loss_inputs(shift=0.0)
        output = self.loss().losses(inputs)
        (output.losses * inputs.mask).sum().backward()  # type: ignore[no-untyped-call]
        gradient = inputs.logprobs.grad
        assert gradient is not None
        assert torch.allclose(gradient, -inputs.advantages * inputs.mask, atol=1e-5)

    def test_tokens_do_not_see_each_other(self) -> None:
        inputs = self._loss_inputs()
        output = self.loss().losses(inputs)
        other = inputs.logprobs.detach().clone()
        other[1:] -= 1.0
        changed = self.loss().losses(replace(inputs, logprobs=other))
        assert torch.allclose(changed.losses[0], output.losses[0].detach(), atol=1e-6)

    def test_inputs_are_not_changed(self) -> None:
        inputs, same = self._loss_inputs(), self._loss_inputs()
        self.loss().losses(inputs)
        for name in ("logprobs", "old_logprobs", "advantages", "mask"):
            assert torch.equal(getattr(inputs, name), getattr(same, name)), name
