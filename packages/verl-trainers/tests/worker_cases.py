"""Tiny models and batches for the tests of policy workers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_contracts.runtime import PayloadRef
from verl_contracts.samples import Trajectory
from verl_contracts.tokens import SAMPLED, VersionSpan
from verl_contracts.training import TrainRow, TrainSample
from verl_trainers.config.schema import ActorConfig, ModelConfig, OptimConfig
from verl_trainers.workers.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["make_batch", "make_model", "make_sample", "make_settings"]

VOCABULARY = 32


def make_model(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2, tie: bool = True) -> str:
    """Write a random Qwen2 and return its folder."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return str(folder)


def make_sample(
    *,
    uid: str,
    sample: int,
    score: float,
    ids: Sequence[int],
    prompt: int,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[int] | None = None,
    version: int = 0,
) -> TrainSample:
    """Return a sample of one trajectory; everything after the prompt is trained unless `mask` says otherwise."""
    trajectory = Trajectory(
        ids=tuple(ids),
        loss_mask=tuple(mask) if mask is not None else (0,) * prompt + (1,) * (len(ids) - prompt),
        logprobs=tuple(logprobs) if logprobs is not None else (0.0,) * prompt + (-3.0,) * (len(ids) - prompt),
        spans=(VersionSpan(version=version, kv_version=version, start=prompt, end=len(ids)),),
        logprob_kind=SAMPLED,
        prompt_length=prompt,
    )
    row = TrainRow(
        uid=uid,
        sample=sample,
        score=score,
        payload=PayloadRef(num_bytes=0, value=(trajectory,)),
        num_tokens=len(ids),
        num_trained=trajectory.num_trained,
    )
    return TrainSample(row=row, trajectories=(trajectory,))


def make_batch(
    *, groups: int = 4, n: int = 4, seed: int = 0, prompt: int = 5, lengths: tuple[int, int] = (2, 9), version: int = 0
) -> list[TrainSample]:
    """Return ragged samples with random ids, masks and scores."""
    draw = random.Random(seed)
    samples: list[TrainSample] = []
    for group in range(groups):
        for index in range(n):
            length = prompt + draw.randint(*lengths)
            mask = [0] * prompt + [int(draw.random() < 0.85) for _ in range(length - prompt)]
            mask[prompt] = 1
            samples.append(
                make_sample(
                    uid=f"0-{group}-0",
                    sample=index,
                    score=draw.random(),
                    ids=[draw.randrange(VOCABULARY) for _ in range(length)],
                    prompt=prompt,
                    logprobs=[0.0] * prompt + [-3.4 + 0.2 * draw.random() for _ in range(length - prompt)],
                    mask=mask,
                    version=version,
                )
            )
    return samples


def make_settings(
    path: str, *, actor: ActorConfig | None = None, total_steps: int = 10, rank: int = 0, world_size: int = 1
) -> EngineSettings:
    """Return settings with a learning rate that shows, unless `actor` says otherwise."""
    return EngineSettings(
        model=ModelConfig(path=path),
        total_steps=total_steps,
        actor=actor if actor is not None else ActorConfig(optim=OptimConfig(lr=1e-3)),
        rank=rank,
        world_size=world_size,
    )
