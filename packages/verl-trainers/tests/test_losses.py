"""The clipped loss against hand computation, KL estimators, and denominators that survive any cut."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import pytest
import torch

from verl_contracts.errors import ConfigError
from verl_contracts.training import LossAggregation, PolicyLossInputs
from verl_trainers.config.schema import ActorConfig, PolicyLossConfig
from verl_trainers.losses.aggregate import aggregate, count
from verl_trainers.losses.entropy import entropy
from verl_trainers.losses.kl import kl_estimate
from verl_trainers.losses.ppo_clip import PpoClip
from verl_trainers.workers import token_logprobs
from verl_trainers.workers.algorithm import build_policy_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

MODES: tuple[LossAggregation, ...] = get_args(LossAggregation)


def _inputs(new: Sequence[float], old: Sequence[float], advantages: Sequence[float]) -> PolicyLossInputs:
    return PolicyLossInputs(
        logprobs=torch.tensor([new], requires_grad=True),
        old_logprobs=torch.tensor([old]),
        advantages=torch.tensor([advantages]),
        mask=torch.ones(1, len(new)),
    )


def test_three_tokens_by_hand() -> None:
    """Probabilities new/old: 0.6/0.4, 0.3/0.4, 0.5/0.5, so ratios 1.5, 0.75, 1; bounds 0.8 and 1.28."""
    inputs = _inputs(
        [math.log(0.6), math.log(0.3), math.log(0.5)], [math.log(0.4), math.log(0.4), math.log(0.5)], [1.0, -1.0, 2.0]
    )
    output = PpoClip(clip_ratio_low=0.2, clip_ratio_high=0.28).losses(inputs)
    # 1.5 is cut to 1.28; 0.75 is cut to 0.8, since a lower ratio would help a negative advantage; 1 stays.
    assert output.losses[0].tolist() == pytest.approx([-1.28, 0.8, -2.0])
    loss = aggregate(output.losses, inputs.mask, "token-mean", count(inputs.mask))
    assert loss.item() == pytest.approx((-1.28 + 0.8 - 2.0) / 3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -2.0 / 3], abs=1e-7)
    assert output.metrics["clip_share"][0].tolist() == [1.0, 1.0, 0.0]
    assert output.metrics["ratio"][0].tolist() == pytest.approx([1.5, 0.75, 1.0])
    assert output.metrics["approx_kl"][0].tolist() == pytest.approx(
        [0.5 - math.log(1.5), -0.25 - math.log(0.75), 0.0], abs=1e-6
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.5, 1.0, -1.2, False),
        (0.5, 1.0, -0.5, True),
        (1.5, -1.0, 1.5, True),
        (0.5, -1.0, 0.8, False),
        (1.1, 1.0, -1.1, True),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_gradient_stops_only_where_the_bound_binds(ratio: float, advantage: float, loss: float, moves: bool) -> None:
    inputs = _inputs([math.log(ratio)], [0.0], [advantage])
    output = PpoClip().losses(inputs)
    output.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert output.losses.item() == pytest.approx(loss, rel=1e-5)
    assert inputs.logprobs.grad is not None
    assert (inputs.logprobs.grad.item() != 0.0) == moves


def test_absurd_ratio_stays_finite() -> None:
    inputs = _inputs([0.0], [-1e4], [-1.0])
    output = PpoClip().losses(inputs)
    output.losses.sum().backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(output.losses.item())
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(inputs.logprobs.grad).all()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="clip_ratio_low"):
        PpoClip(clip_ratio_low=1.0)
    with pytest.raises(ConfigError, match="aggregation"):
        PpoClip(aggregation="mean")  # type: ignore[arg-type]


def test_loss_is_built_from_the_keys_of_the_schema() -> None:
    loss = build_policy_loss(ActorConfig(clip_ratio_high=0.5, loss_agg_mode="seq-mean-token-sum"))
    assert loss.aggregation == "seq-mean-token-sum"
    assert loss.losses(_inputs([math.log(1.5)], [0.0], [1.0])).losses.item() == pytest.approx(-1.5)
    with pytest.raises(ConfigError, match=r"policy_loss\.options\.dual: unknown option; PpoClip takes"):
        build_policy_loss(ActorConfig(policy_loss=PolicyLossConfig(options={"dual": 3.0})))


def test_kl_estimators_by_hand() -> None:
    new, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_estimate(new, reference, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(new, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(new, reference, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_are_unbiased_over_the_policy() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    true = float((policy * (policy / reference).log()).sum())
    for kind in ("k1", "k3"):
        assert float((policy * kl_estimate(policy.log(), reference.log(), kind)).sum()) == pytest.approx(true)
    assert float((policy * kl_estimate(policy.log(), reference.log(), "k2")).sum()) != pytest.approx(true, rel=1e-3)


def test_entropy_of_known_distributions() -> None:
    rows = torch.log_softmax(torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7]), dim=-1)
    assert entropy(rows).tolist() == pytest.approx([math.log(8), 0.0], abs=1e-6)


def test_aggregation_by_hand() -> None:
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, float("inf"), float("nan")], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    counts = count(mask)
    assert (counts.tokens, counts.sequences) == (4.0, 2.0)
    assert aggregate(losses, mask, "token-mean", counts).item() == 4.0
    assert aggregate(losses, mask, "seq-mean-token-sum", counts).item() == 8.0
    assert aggregate(losses, mask, "seq-mean-token-mean", counts).item() == 6.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_gradient_does_not_depend_on_the_cut(
    mode: LossAggregation, dtype: torch.dtype, limit: float, pieces: int
) -> None:
    generator = torch.Generator().manual_seed(pieces)
    features = torch.randn(16, 12, 6, generator=generator, dtype=dtype)
    lengths = torch.randint(0, 13, (16, 1), generator=generator)
    mask = ((torch.arange(12) < lengths) & (torch.rand(16, 12, generator=generator) < 0.8)).to(dtype)
    advantages = torch.randn(16, 1, generator=generator, dtype=dtype) * mask
    old = 0.1 * torch.randn(16, 12, generator=generator, dtype=dtype)
    start = 0.1 * torch.randn(6, generator=generator, dtype=dtype)
    loss = PpoClip(aggregation=mode)
    counts = count(mask)

    def gradient(parts: int) -> torch.Tensor:
        weight = start.clone().requires_grad_()
        for rows in torch.arange(16).tensor_split(parts):
            width = max(1, int(lengths[rows].max()))
            inputs = PolicyLossInputs(
                logprobs=(features[rows] @ weight)[:, :width],
                old_logprobs=old[rows, :width],
                advantages=advantages[rows, :width],
                mask=mask[rows, :width],
            )
            aggregate(loss.losses(inputs).losses, inputs.mask, mode, counts).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        return weight.grad

    whole, cut = gradient(1), gradient(pieces)
    assert float(whole.norm()) > 1e-3
    assert float((whole - cut).norm() / whole.norm()) < limit


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_blockwise_log_probs_have_the_right_gradients(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_logprobs, "_BLOCK_ELEMENTS", 12)  # two rows a block
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 5, 2, 2, 1])
    picked, bits = token_logprobs.token_log_probs(logits, tokens, temperature=temperature)
    plain = torch.log_softmax(logits / temperature, dim=-1)
    assert torch.allclose(picked, plain[torch.arange(5), tokens])
    assert torch.allclose(bits, entropy(plain))
    assert torch.autograd.gradcheck(
        lambda rows: token_logprobs.token_log_probs(rows, tokens, temperature=temperature), (logits,)
    )


def test_blockwise_log_probs_are_wide_and_gradients_are_not() -> None:
    logits = torch.randn(3, 6).bfloat16().requires_grad_()
    picked, bits = token_logprobs.token_log_probs(logits, torch.tensor([0, 1, 2]), temperature=1.0)
    (picked.sum() + bits.sum()).backward()  # type: ignore[no-untyped-call]
    assert picked.dtype == bits.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
