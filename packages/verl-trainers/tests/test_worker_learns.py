"""The whole step, judged by whether a policy learns: to say one digit three times, from 3 % to nearly all."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from worker_cases import make_model, make_sample, make_settings

from verl_contracts.tracking import reduce_metrics
from verl_contracts.training import StepContext, TrainSample
from verl_trainers.config.schema import ActorConfig, AlgorithmConfig, OptimConfig
from verl_trainers.workers.engine import FsdpEngine

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

STEPS = 60


@torch.no_grad()
def _sample(model: PreTrainedModel, *, step: int, generator: torch.Generator) -> list[TrainSample]:
    """Sample 16 groups of 8: prompt ``d d``, three tokens, scored by the share of them that is d."""
    digits = torch.randint(3, 8, (16, 1), generator=generator).repeat_interleave(8, 0)
    ids = torch.cat([digits, digits], dim=1)
    columns: list[torch.Tensor] = []
    for _ in range(3):
        rows = torch.log_softmax(model(ids).logits[:, -1], dim=-1)
        drawn = torch.multinomial(rows.exp(), 1, generator=generator)
        columns.append(rows.gather(1, drawn))
        ids = torch.cat([ids, drawn], dim=1)
    scores = (ids[:, 2:] == digits).float().mean(dim=1)
    logprobs = torch.cat(columns, dim=1)
    return [
        make_sample(
            uid=f"{step}-{index // 8}-0",
            sample=index % 8,
            score=float(scores[index]),
            ids=ids[index].tolist(),
            prompt=2,
            logprobs=[0.0, 0.0, *logprobs[index].tolist()],
            version=step - 1,
        )
        for index in range(len(ids))
    ]


def test_policy_learns_from_its_own_samples(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = make_model(tmp_path / "model", hidden=64)
    actor = ActorConfig(clip_ratio_high=0.28, optim=OptimConfig(lr=2e-3, lr_warmup_steps=5, betas=(0.9, 0.99)))
    settings = dataclasses.replace(
        make_settings(path, actor=actor, total_steps=STEPS), algorithm=AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    )
    engine = FsdpEngine(settings)
    replica: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = dict(replica.named_parameters())
    generator = torch.Generator().manual_seed(0)
    rewards: list[float] = []
    for step in range(1, STEPS + 1):
        batch = _sample(replica, step=step, generator=generator)
        result = engine.update(batch, StepContext(step=step, total_steps=STEPS))
        with torch.no_grad():
            for meta, tensor in engine.weights().tensors():
                parameters[meta.name].copy_(tensor)
        got = reduce_metrics(result.metrics)
        rewards.append(sum(sample.row.score for sample in batch) / len(batch))
        assert got["rollout/logprob_diff_same_version"] < 1e-4
    assert rewards[0] < 0.1
    assert sum(rewards[-5:]) / 5 > 0.8
