"""The pass that is written out computes what the model computes, for every class that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from engine_models import build, request_of, settings_of, tensors_of
from test_decoder import Bench
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from verl_rollout.engine.torch.cache import Decode, KVCache, Prefill
from verl_rollout.engine.torch.forward import Forward, ModelForward, PlainForward, build_forward
from verl_rollout.engine.torch.model import allocate, build_model, release
from verl_rollout.engine.torch.target import ModelTarget

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 8}),
}
OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "another class": ("mistral", {"sliding_window": None}),
    "a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
    "angles that depend on the length": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


def small(family: str, changes: dict[str, object]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(family, **SIZES, **changes)
    return config


@dataclass(frozen=True)
class Loaded:
    """A model of the engine's making, with values."""

    model: PreTrainedModel
    weights: PreTrainedModel
    cache: KVCache

    def fill(self) -> None:
        ModelTarget(self.model, guard=lambda: None, loaded=lambda _: None).load(tensors_of(self.weights))

    def run(self, forward: Forward) -> torch.Tensor:
        """Prefill two prompts of unequal length in two chunks, decode a token of each, and return the logits."""
        self.cache.data.zero_()
        ids = torch.arange(32).reshape(2, 16) % 31
        slots = torch.tensor([0, 1])
        with torch.inference_mode():
            for start in (0, 8):
                forward.fill(
                    ids[:, start : start + 8],
                    torch.arange(start, start + 8).expand(2, 8),
                    Prefill(self.cache, slots, start=start, tokens=8),
                )
            positions = torch.tensor([5, 16])
            return forward.logits(slots[:, None], positions[:, None], Decode(self.cache, positions, length=24))


def loaded(config: PreTrainedConfig, folder: Path) -> Loaded:
    config.save_pretrained(folder)
    model, shape = build_model(settings_of(folder))
    weights = build(config)
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            if parameter.dim() == 1:
                # Initialized biases are zeros and norms ones, beside which a mistake would not show.
                parameter.copy_(torch.linspace(-0.5, 0.5, len(parameter)) + ("norm" in name))
    value = Loaded(model, weights, shape.build_cache(slots=2, dtype=torch.float32, max_length=64))
    value.fill()
    return value


@pytest.mark.parametrize("name", PLAIN)
def test_logits_equal_the_models_own_when_it_is_plain(name: str, tmp_path: Path) -> None:
    one = loaded(small(*PLAIN[name]), tmp_path)
    wanted = one.run(ModelForward(one.model))
    forward = build_forward(one.model, max_length=64)
    assert isinstance(forward, PlainForward)
    assert wanted.std() > 0.1
    torch.testing.assert_close(one.run(forward), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_runs_as_it_is_when_it_is_not_plain(name: str, tmp_path: Path) -> None:
    assert isinstance(build_forward(loaded(small(*OTHERS[name]), tmp_path).model, max_length=64), ModelForward)


@pytest.mark.parametrize("name", ["llama, biases", "qwen3"])
def test_new_weights_are_used_when_they_arrive_after_binding(name: str, tmp_path: Path) -> None:
    one = loaded(small(*PLAIN[name]), tmp_path)
    forward = build_forward(one.model, max_length=64)
    before = one.run(forward)
    with torch.no_grad():
        for parameter in one.weights.parameters():
            parameter.mul_(1.1)
    one.fill()
    after = one.run(forward)
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(after, one.run(ModelForward(one.model)), atol=1e-4, rtol=1e-4)


def test_parameters_are_freed_and_bound_again_when_released(tmp_path: Path) -> None:
    one = loaded(small(*PLAIN["qwen2"]), tmp_path)
    forward = build_forward(one.model, max_length=64)
    wanted = one.run(forward)
    forward.release()
    shapes = release(one.model)
    assert sum(parameter.untyped_storage().nbytes() for parameter in one.model.parameters()) == 0
    allocate(one.model, shapes)
    forward.bind()
    one.fill()
    assert torch.equal(one.run(forward), wanted)


def test_answers_equal_the_models_own_when_a_model_is_not_plain(tmp_path: Path) -> None:
    config = small(*OTHERS["another class"])
    config.save_pretrained(tmp_path)
    weights = build(config)
    with torch.inference_mode():
        one = Bench(settings_of(tmp_path), weights)
        one.submit(*(request_of((1, 2, 3 + i), max_tokens=9, temperature=0.0, name=str(i)) for i in range(6)))
        done = one.finish()
    for i in range(6):
        wanted = weights.generate(  # type: ignore[operator]
            torch.tensor([[1, 2, 3 + i]]),
            attention_mask=torch.ones(1, 3, dtype=torch.long),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(done[str(i)].token_ids) == wanted[0, 3:].tolist()
