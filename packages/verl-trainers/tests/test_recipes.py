"""The shipped recipes: they load, pass every check, and what they prepare fits them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cli_cases import STANDINS
from transformers import AutoModelForCausalLM

from verl_trainers.config.check import check_relations
from verl_trainers.config.load import load_config, resolve_config
from verl_trainers.data.rows import read_rows
from verl_trainers.recipes import arithmetic, toy
from verl_trainers.recipes.catalog import RECIPES
from verl_trainers.rewards.decode import load_decoder
from verl_trainers.run import open_data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    toy.prepare(folder / "prepared")
    return folder


@pytest.mark.parametrize("name", ["quickstart", "smollm2_arithmetic"])
def test_a_recipe_breaks_no_rule(name: str) -> None:
    assert check_relations(load_config(RECIPES / f"{name}.yaml", run_dir="/runs/1")) == []


def test_quickstart_passes_every_check_before_it_is_prepared(tmp_path: Path) -> None:
    resolved = resolve_config(RECIPES / "quickstart.yaml", STANDINS, run_dir=str(tmp_path / "run"))
    assert resolved.plugins.reward is not None
    assert resolved.config.data.train_files == (str(tmp_path / "run/prepared/train.jsonl"),)
    assert list(tmp_path.iterdir()) == []


def test_quickstart_prepares_what_it_reads(run_dir: Path) -> None:
    config = load_config(RECIPES / "quickstart.yaml", run_dir=str(run_dir))
    data = open_data(config)
    assert data.steps.steps == config.trainer.total_training_steps
    assert len(data.validation) == toy.HELD_OUT
    assert data.train.num_rows == 10_000 - toy.HELD_OUT
    assert data.stop_token_ids == (11,)
    held_out = {prompt.prompt_ids for prompt in data.validation}
    first = data.train.next()
    assert first is not None
    assert len(first.prompt_ids) == config.data.max_prompt_length
    assert first.prompt_ids not in held_out
    decode = load_decoder(config.actor_rollout_ref.model.path)
    assert decode(first.prompt_ids) == f"{first.ground_truth} ="
    assert decode((*first.prompt_ids[:4], 11)) == first.ground_truth


def test_the_toy_model_is_small_and_the_same_each_time(run_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "prepared/model")
    assert 250_000 < model.num_parameters() < 400_000
    toy.prepare(tmp_path)
    for name in ("model/model.safetensors", "train.jsonl", "val.jsonl"):
        digests = {
            hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (run_dir / "prepared", tmp_path)
        }
        assert len(digests) == 1, name


def test_arithmetic_asks_each_sum_once(tmp_path: Path) -> None:
    arithmetic.prepare(tmp_path)
    text = "".join((tmp_path / f"{name}.jsonl").read_text() for name in ("train", "val"))
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 21 * 21
    assert len({row["prompt"][0]["content"] for row in rows}) == 21 * 21
    for row in rows:
        assert row["prompt"][0]["content"] == f"What is {row['extra_info']['a']} + {row['extra_info']['b']}?"
        assert row["reward_model"]["ground_truth"] == str(row["extra_info"]["a"] + row["extra_info"]["b"])
    assert len(read_rows([str(tmp_path / "val.jsonl")], prompt_key="prompt")) == arithmetic.HELD_OUT
