"""Copy-4: the smallest task on which a policy visibly learns, with its model, its tokenizer and its data.

A prompt is ``d d d d =``, the answer the same four digits and the end of the sequence. All of it follows from one seed.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["prepare"]

SEED = 0
DIGITS = 4
HELD_OUT = 256
WORDS = (*"0123456789", "=", "<eos>")


def prepare(folder: Path) -> None:
    """Write ``model/``, ``train.jsonl`` and ``val.jsonl`` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    numbers = list(range(10**DIGITS))
    random.Random(SEED).shuffle(numbers)
    write_rows(folder / "val.jsonl", numbers[:HELD_OUT])
    write_rows(folder / "train.jsonl", numbers[HELD_OUT:])


def write_rows(path: Path, numbers: Sequence[int]) -> None:
    """Write one row for each number, in verl's columns."""
    with path.open("w", encoding="utf-8") as file:
        for number in numbers:
            digits = " ".join(f"{number:0{DIGITS}d}")
            row = {"prompt": f"{digits} =", "data_source": "copy", "reward_model": {"ground_truth": digits}}
            file.write(json.dumps(row) + "\n")


def write_model(folder: Path) -> None:
    """Write a randomly initialized Qwen2 of 2 layers and its tokenizer, one token per digit."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="="))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    wrapped = wrap(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    wrapped.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<eos>"],
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        build: Callable[[Qwen2Config], Qwen2ForCausalLM] = Qwen2ForCausalLM
        model = build(config)
    model.save_pretrained(folder)
