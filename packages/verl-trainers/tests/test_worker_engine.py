"""One rank's step: log-probs, gradients under any cut, the schedule, master weights, and what is logged."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM
from worker_cases import make_batch, make_model, make_sample, make_settings

from verl_contracts.errors import ConfigError, StateError
from verl_contracts.tracking import reduce_metrics
from verl_contracts.training import PolicyLossInputs, PolicyLossOutput, StepContext, StepResult, TrainSample
from verl_trainers.config.engine import LOGPROB_DIFF_LIMITS
from verl_trainers.config.schema import ActorConfig, AlgorithmConfig, FsdpConfig, OptimConfig, PolicyLossConfig
from verl_trainers.core.mismatch import MismatchWatch
from verl_trainers.losses.ppo_clip import PpoClip
from verl_trainers.workers.engine import FsdpEngine
from verl_trainers.workers.schedule import learning_rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verl_trainers.workers.settings import EngineSettings

SGD_LIKE = OptimConfig(lr=1e-3, weight_decay=0.0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def _step(engine: FsdpEngine, batch: Sequence[TrainSample], step: int = 1) -> StepResult:
    return engine.update(batch, StepContext(step=step, total_steps=10))


def _weights(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {meta.name: tensor.clone() for meta, tensor in engine.weights().tensors()}


def _metrics(result: StepResult) -> dict[str, float]:
    return reduce_metrics(result.metrics)


def _sampled_by(engine: FsdpEngine, batch: Sequence[TrainSample]) -> list[TrainSample]:
    """Return `batch` with the log-probs that `engine` gives, as if it had sampled."""
    out = []
    for sample, row in zip(batch, engine.log_probs(batch), strict=True):
        (old,) = sample.trajectories
        values = tuple(float(v) if m else 0.0 for v, m in zip(row, old.loss_mask, strict=True))
        out.append(dataclasses.replace(sample, trajectories=(dataclasses.replace(old, logprobs=values),)))
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_plain_model_whatever_the_cut(model: str, temperature: float) -> None:
    batch = make_batch(lengths=(1, 30))
    settings = dataclasses.replace(make_settings(model), temperature=temperature)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for budget in (16384, 80, 1):
        cut = dataclasses.replace(settings, actor=ActorConfig(ppo_max_token_len_per_gpu=budget))
        for sample, got in zip(batch, FsdpEngine(cut).log_probs(batch), strict=True):
            ids = torch.tensor([sample.trajectories[0].ids])
            with torch.no_grad():
                rows = torch.log_softmax(plain(ids).logits[0, :-1] / temperature, dim=-1)
            want = rows.gather(1, ids[0, 1:, None])[:, 0]
            assert got[0] == 0.0
            assert torch.allclose(got[1:], want, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_step_does_not_depend_on_micro_batches(model: str, mode: str) -> None:
    """AdamW hides the gradient's size, so its norm is compared too."""
    batch = make_batch(lengths=(1, 20))
    norms: list[float] = []
    weights: list[dict[str, torch.Tensor]] = []
    for budget in (16384, 100, 1):
        actor = ActorConfig(
            ppo_max_token_len_per_gpu=budget,
            loss_agg_mode=mode,  # type: ignore[arg-type]
            entropy_coeff=0.02,
            use_kl_loss=True,
            kl_loss_coef=0.1,
            optim=OptimConfig(lr=1e-3, eps=1.0, weight_decay=0.0),
        )
        engine = FsdpEngine(make_settings(model, actor=actor))
        norms.append(_metrics(_step(engine, batch))["actor/grad_norm"])
        weights.append(_weights(engine))
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-5)
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            assert torch.allclose(tensor, other[name], atol=1e-8, rtol=1e-6), name


def test_rows_left_out_change_no_gradient(model: str) -> None:
    """Equal scores in two of four groups: computing them or not gives one norm, as they stay in the denominator."""
    batch = make_batch()
    batch = [
        dataclasses.replace(s, row=dataclasses.replace(s.row, score=0.5)) if s.row.uid < "0-2" else s for s in batch
    ]
    norms = []
    for coefficient in (0.0, 1e-30):
        engine = FsdpEngine(make_settings(model, actor=ActorConfig(entropy_coeff=coefficient, optim=SGD_LIKE)))
        got = _metrics(_step(engine, batch))
        assert got["actor/zero_advantage_rows"] == 8
        norms.append(got["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_step_with_no_advantage_at_all_is_harmless(model: str) -> None:
    engine = FsdpEngine(make_settings(model, actor=ActorConfig(optim=SGD_LIKE)))
    before = _weights(engine)
    batch = [dataclasses.replace(s, row=dataclasses.replace(s.row, score=1.0)) for s in make_batch()]
    result = _step(engine, batch)
    assert (result.rows, result.updates, result.version) == (16, 1, 1)
    assert _metrics(result)["actor/grad_norm"] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())


def test_order_of_arrival_changes_no_bit(model: str) -> None:
    batch = make_batch()
    runs = []
    for rows in (batch, batch[::-1], batch):
        engine = FsdpEngine(make_settings(model, actor=ActorConfig(entropy_coeff=0.02, ppo_mini_batch_size=2)))
        for step in (1, 2):
            _step(engine, rows, step)
        runs.append(_weights(engine))
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], tensor) for name, tensor in other.items())


def test_reward_goes_where_the_advantage_points(model: str) -> None:
    engine = FsdpEngine(make_settings(model, actor=ActorConfig(old_log_prob="recompute", optim=OptimConfig(lr=3e-3))))
    good = make_sample(uid="a", sample=0, score=1.0, ids=[1, 2, 3, 4], prompt=2)
    bad = make_sample(uid="a", sample=1, score=0.0, ids=[1, 2, 5, 6], prompt=2)
    before = [float(row[2:].sum()) for row in engine.log_probs([good, bad])]
    for step in range(1, 6):
        _step(engine, [good, bad], step)
    after = [float(row[2:].sum()) for row in engine.log_probs([good, bad])]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_gap_is_zero_when_the_sampler_was_this_policy_and_shows_when_it_was_not(model: str) -> None:
    engine = FsdpEngine(make_settings(model))
    batch = _sampled_by(engine, make_batch())
    got = _metrics(_step(engine, batch))
    assert got["rollout/logprob_diff"] < 1e-6
    assert got["rollout/logprob_diff_same_version"] < 1e-6
    assert got["actor/ratio"] == pytest.approx(1.0, abs=1e-6)
    later = _metrics(_step(engine, batch, 2))
    assert later["rollout/logprob_diff"] > 1e-4
    assert "rollout/logprob_diff_same_version" not in later


def test_log_probs_of_another_sampler_are_told_from_numerics_at_equal_weights(model: str) -> None:
    engine = FsdpEngine(make_settings(model))
    right = _metrics(_step(engine, _sampled_by(engine, make_batch())))
    wrong = _metrics(_step(FsdpEngine(make_settings(model)), make_batch()))
    watch = MismatchWatch(limit=max(LOGPROB_DIFF_LIMITS.values()))
    watch.see(1, right)
    assert not watch.said
    watch.see(1, wrong)
    assert watch.said


@pytest.mark.parametrize("epochs", [1, 2])
def test_recomputed_old_log_probs_make_the_first_ratio_one(model: str, epochs: int) -> None:
    actor = ActorConfig(old_log_prob="recompute", ppo_epochs=epochs, optim=OptimConfig(lr=1e-2))
    got = [
        m.value
        for m in _step(FsdpEngine(make_settings(model, actor=actor)), make_batch()).metrics
        if m.name == "actor/ratio"
    ]
    assert len(got) == epochs
    assert got[0] == pytest.approx(1.0, abs=1e-6)
    assert all(abs(value - 1.0) > 1e-4 for value in got[1:])


def test_several_updates_are_made_and_counted(model: str) -> None:
    actor = ActorConfig(ppo_mini_batch_size=2, ppo_epochs=3)
    result = _step(FsdpEngine(make_settings(model, actor=actor)), make_batch())
    assert result.updates == 6


def test_reference_stays_the_initial_policy(model: str) -> None:
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=0.0, optim=OptimConfig(lr=1e-2))
    engine = FsdpEngine(make_settings(model, actor=actor))
    first = _metrics(_step(engine, make_batch()))
    second = _metrics(_step(engine, make_batch(), 2))
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert second["actor/kl_loss"] > 1e-4


def test_kl_term_pulls_back(model: str) -> None:
    distances = []
    for coefficient in (0.0, 100.0):
        actor = ActorConfig(use_kl_loss=True, kl_loss_coef=coefficient, grad_clip=1e9, optim=OptimConfig(lr=3e-3))
        engine = FsdpEngine(make_settings(model, actor=actor))
        for step in range(1, 6):
            got = _metrics(_step(engine, make_batch(), step))
        distances.append(got["actor/kl_loss"])
    assert distances[1] < distances[0] / 2


@pytest.mark.parametrize("what", ["log-prob", "score"])
def test_update_that_is_not_finite_changes_nothing_and_is_counted(
    model: str, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    settings = dataclasses.replace(make_settings(model), algorithm=AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    engine = FsdpEngine(settings)
    _step(engine, make_batch())
    before = _weights(engine)
    broken = make_batch()
    nan = dataclasses.replace(broken[0].trajectories[0], logprobs=(float("nan"),) * len(broken[0].trajectories[0].ids))
    if what == "log-prob":
        broken[0] = dataclasses.replace(broken[0], trajectories=(nan,))
    else:
        broken[0] = dataclasses.replace(broken[0], row=dataclasses.replace(broken[0].row, score=3e38))
    result = _step(engine, broken, 2)
    assert (result.updates, result.version) == (0, 2)
    assert _metrics(result)["actor/skipped_updates"] == 1
    assert "update skipped" in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())
    assert _step(engine, make_batch(), 3).updates == 1
    assert any(not torch.equal(before[name], tensor) for name, tensor in _weights(engine).items())


class Raising(PpoClip):
    """A loss that raises at its second micro-batch."""

    calls = 0

    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        Raising.calls += 1
        if Raising.calls == 2:
            raise ValueError("second micro-batch")
        return super().losses(inputs)


def test_step_that_raised_leaves_no_gradient_behind(model: str) -> None:
    policy_loss = PolicyLossConfig(loss_mode=f"{__name__}:Raising")
    actor = ActorConfig(policy_loss=policy_loss, ppo_max_token_len_per_gpu=60)
    engine = FsdpEngine(make_settings(model, actor=actor))
    with pytest.raises(ValueError, match="second micro-batch"):
        _step(engine, make_batch())
    want = _metrics(_step(FsdpEngine(make_settings(model, actor=actor)), make_batch()))["actor/grad_norm"]
    assert _metrics(_step(engine, make_batch()))["actor/grad_norm"] == want


def test_bfloat16_keeps_float32_masters(model: str) -> None:
    """Steps of 1e-6 are lost on bfloat16 weights near 0.02, and must add up."""
    actor = ActorConfig(fsdp_config=FsdpConfig(model_dtype="bfloat16"), optim=OptimConfig(lr=1e-6, weight_decay=0.0))
    engine = FsdpEngine(make_settings(model, actor=actor))
    before = _weights(engine)
    for step in range(1, 6):
        _step(engine, make_batch(), step)
    after = _weights(engine)
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].dtype == torch.float32
    moved = (after[name] - before[name]).abs()
    assert 1e-6 < float(moved.max()) < 1e-5
    assert float((moved > 0).float().mean()) > 0.9


def test_bfloat16_agrees_with_float32_roughly(model: str) -> None:
    norms = []
    for dtype in ("float32", "bfloat16"):
        actor = ActorConfig(fsdp_config=FsdpConfig(model_dtype=dtype), ppo_max_token_len_per_gpu=60)
        norms.append(_metrics(_step(FsdpEngine(make_settings(model, actor=actor)), make_batch()))["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    assert norms[0] != norms[1]


def test_gradient_is_clipped_by_global_norm(model: str) -> None:
    """With a huge epsilon AdamW's first step is proportional to the clipped gradient."""
    moves = []
    for clip in (1e-3, 2e-3):
        actor = ActorConfig(grad_clip=clip, optim=OptimConfig(lr=1e3, eps=1e3, weight_decay=0.0))
        engine = FsdpEngine(make_settings(model, actor=actor))
        before = _weights(engine)
        assert _metrics(_step(engine, make_batch()))["actor/grad_norm"] > 2e-3
        after = _weights(engine)
        moves.append(math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in after)))
    assert moves[0] == pytest.approx(1e-3, rel=1e-2)
    assert moves[1] == pytest.approx(2e-3, rel=1e-2)


def test_learning_rate_warms_up_and_falls() -> None:
    constant = OptimConfig(lr=2.0, lr_warmup_steps=4)
    assert [learning_rate(constant, step, 8) for step in range(1, 7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    cosine = OptimConfig(lr=2.0, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    got = [learning_rate(cosine, step, 6) for step in range(1, 8)]
    want = [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(5)]
    assert got == pytest.approx([1.0, *want, 0.2])
    assert got[5] == pytest.approx(0.2)


def test_learning_rate_of_a_step_is_the_schedules(model: str) -> None:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=3, lr_scheduler_type="cosine")
    engine = FsdpEngine(make_settings(model, actor=ActorConfig(optim=optim, ppo_epochs=2)))
    got = [_metrics(_step(engine, make_batch(), step))["actor/lr"] for step in (1, 2, 3, 4)]
    assert got == [learning_rate(optim, step, 10) for step in (1, 2, 3, 4)]


def test_step_of_another_run_is_refused(model: str) -> None:
    with pytest.raises(StateError, match=r"run of 11 steps.*planned for 10"):
        FsdpEngine(make_settings(model)).update(make_batch(), StepContext(step=1, total_steps=11))


def test_greedy_temperature_and_missing_model_are_refused(model: str, tmp_path: Path) -> None:
    settings: EngineSettings = dataclasses.replace(make_settings(model), temperature=0.0)
    with pytest.raises(ConfigError, match=r"rollout\.temperature must be > 0"):
        FsdpEngine(settings)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path"):
        FsdpEngine(make_settings(str(tmp_path / "nothing")))
