"""Model folders for tests: a config.json of a known model, a tokenizer, weights that are as they should be or not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

QWEN_05B: Mapping[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
}
"""Qwen2.5-0.5B."""

TINY: Mapping[str, object] = {
    **QWEN_05B,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def write_model_folder(folder: Path, config: Mapping[str, object], *, tokenizer: bool = True) -> Path:
    """Write config, tokenizer and a weight file that holds next to nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"nothing": torch.zeros(4)}, folder / "model.safetensors")
    if tokenizer:
        words = Tokenizer(WordLevel({word: i for i, word in enumerate(["<eos>", *"abcdefg"])}, unk_token="g"))
        words.pre_tokenizer = WhitespaceSplit()
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder
