"""Tiny models on disk, and engines that hold their weights. Built from a config and a seed: nothing is downloaded."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.rollout import RolloutSettings
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams
from verl_contracts.weights import TensorMeta
from verl_rollout.engine.torch.engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

CLOCK = SystemClock()
Family = Literal["qwen2", "llama"]
VOCAB = 31


@dataclass(frozen=True)
class Tiny:
    path: Path
    model: PreTrainedModel
    other: PreTrainedModel
    """The same shapes with other values."""


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(CLOCK, seconds)


def config_of(family: Family) -> PreTrainedConfig:
    if family == "qwen2":
        return Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def build(config: PreTrainedConfig, *, seed: int = 0, spread: float = 8.0) -> PreTrainedModel:
    """Return a model with values; `spread` sharpens its distributions, which are flat after initialization."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread if parameter.shape[0] == config.vocab_size else 3.0)
    model.requires_grad_(False).train(mode=False)
    return model


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    for name, tensor in model.named_parameters():
        yield meta_of(name, tensor), tensor


def meta_of(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def settings_of(path: Path, **changes: object) -> RolloutSettings:
    base = RolloutSettings(model_path=str(path), max_model_len=64, max_num_seqs=4)
    return replace(base, **changes)  # type: ignore[arg-type]


def request_of(
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    temperature: float = 1.0,
    name: str = "r",
    uid: str = "0-0-0",
    sample: int = 0,
    resumed: int = 0,
    stop: tuple[int, ...] = (),
    top_p: float = 1.0,
    top_k: int | None = None,
    min_version: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop, top_p=top_p, top_k=top_k
        ),
        key=SampleKey(uid=uid, sample=sample, turn=0),
        resumed_tokens=resumed,
        min_version=min_version,
    )


async def sync(engine: TorchEngine, model: PreTrainedModel, version: int, *, keep_cache: bool = False) -> None:
    """Load `model` into a paused engine and commit."""
    engine.begin_update()
    engine.target().load(tensors_of(model))
    await engine.commit(version, keep_cache=keep_cache)


@asynccontextmanager
async def opened(settings: RolloutSettings, model: PreTrainedModel | None) -> AsyncIterator[TorchEngine]:
    """Yield an engine that serves `model` as version 1, or that has never had weights."""
    engine = TorchEngine.create(settings, replica_id="replica-0", rank=0, clock=CLOCK)
    try:
        if model is not None:
            await engine.pause("abort", deadline=soon())
            await sync(engine, model, 1)
            await engine.resume()
        yield engine
    finally:
        await engine.close()


def raw_logprobs(model: PreTrainedModel, prompt: Iterable[int], ids: Iterable[int]) -> torch.Tensor:
    """Return the model's own log-probs of `ids` after `prompt`, by one full forward pass."""
    before, after = list(prompt), list(ids)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def complete(value: object) -> Completion:
    if not isinstance(value, Completion):
        raise TypeError(f"expected a completion, got {value}")
    return value
