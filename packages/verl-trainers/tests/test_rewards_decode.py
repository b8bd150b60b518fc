"""The text that a reward reads comes from the very tokenizer that made the prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from verl_contracts.errors import DataError
from verl_trainers.data.tokenizer import PromptTokenizer
from verl_trainers.recipes import toy
from verl_trainers.rewards.decode import load_decoder


def test_an_answer_reads_as_the_prompt_was_written(tmp_path: Path) -> None:
    toy.write_model(tmp_path)
    texts = ["1 2 3 4 =", "0", "9 9 = ="]
    ids = PromptTokenizer(str(tmp_path)).encode(texts)
    assert [load_decoder(str(tmp_path))(row) for row in ids] == texts


def test_special_tokens_are_left_out_also_when_only_the_config_calls_them_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"yes": 0, "<end>": 1, "<call>": 2}, unk_token="yes"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    added = {"2": {"content": "<call>", "special": True}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = PromptTokenizer(str(tmp_path))
    assert prompts.encode(["yes <call> yes <end>"]) == [(0, 2, 0, 1)]
    assert load_decoder(str(tmp_path))((0, 2, 0, 1)) == "yes yes"


@pytest.mark.parametrize("broken", ["not json", "{}", ""])
def test_a_broken_tokenizer_is_one_line_with_the_key(tmp_path: Path, broken: str) -> None:
    (tmp_path / "tokenizer.json").write_text(broken)
    for load in (load_decoder, PromptTokenizer):
        with pytest.raises(DataError, match=r"actor_rollout_ref\.model\.path: .*copy") as error:
            load(str(tmp_path))
        assert "\n" not in str(error.value)
