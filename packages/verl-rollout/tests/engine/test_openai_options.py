"""An endpoint that could not read a prompt is refused before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers import Qwen2Config

from verl_contracts.errors import ConfigError
from verl_contracts.rollout import RolloutSettings
from verl_rollout.engine.vllm.arguments import engine_arguments
from verl_rollout.engine.vllm.options import VLLMOptions

if TYPE_CHECKING:
    from pathlib import Path


def test_an_endpoint_needs_a_tokenizer(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    Qwen2Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=2).save_pretrained(model)
    other.mkdir()
    (other / "tokenizer.json").touch()
    settings = RolloutSettings(model_path=str(model), engine="vllm")
    assert engine_arguments(settings, VLLMOptions(), rank=0)["skip_tokenizer_init"] is True
    with pytest.raises(ConfigError, match=r"openai_server: is true, and .*model has no tokenizer"):
        engine_arguments(settings, VLLMOptions(openai_server=True), rank=0)
    elsewhere = VLLMOptions(openai_server=True, engine_args={"tokenizer": str(other)})
    assert engine_arguments(settings, elsewhere, rank=0)["skip_tokenizer_init"] is False
    (model / "tokenizer.json").touch()
    assert engine_arguments(settings, VLLMOptions(openai_server=True), rank=0)["skip_tokenizer_init"] is False
