"""The shipped recipes: they load, pass every check, and what they prepare fits them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import STANDINS
from transformers import AutoModelForCausalLM

from verl_contracts.errors import ConfigError
from verl_trainers.config.check import check_relations
from verl_trainers.config.load import load_config, resolve_config
from verl_trainers.data.rows import read_rows
from verl_trainers.data.source import PromptSource
from verl_trainers.recipes import arithmetic, toy
from verl_trainers.recipes.catalog import RECIPES, read_recipe, recipe_names
from verl_trainers.rewards.decode import load_decoder
from verl_trainers.run import open_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    toy.prepare(folder / "prepared")
    return folder


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_breaks_no_rule(name: str) -> None:
    assert check_relations(load_config(RECIPES / f"{name}.yaml", run_dir="/runs/1")) == []


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_passes_every_check_that_needs_no_device(
    name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("VERL_SMOLLM2", "VERL_QWEN"):
        monkeypatch.setenv(variable, str(run_dir / "prepared/model"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))  # a machine that is large enough
    standins = [text for text in STANDINS if not text.startswith(("trainer.mode", "async_training"))]
    resolved = resolve_config(RECIPES / f"{name}.yaml", standins, run_dir=str(run_dir))
    wanted = load_config(RECIPES / f"{name}.yaml", run_dir=str(run_dir))
    assert resolved.config.trainer == replace(wanted.trainer, device="cpu")
    assert resolved.config.async_training == wanted.async_training
    assert resolved.plugins.reward is not None
    assert resolved.plan.placement.trainer_devices == wanted.trainer.n_gpus_per_node


@pytest.mark.parametrize("name", recipe_names())
def test_the_head_of_a_recipe_says_what_it_is_and_when_it_last_ran(name: str) -> None:
    recipe = read_recipe(RECIPES / f"{name}.yaml")
    assert recipe.last_run == "never" or re.match(r"\d{4}-\d{2}-\d{2} on .+, torch \d", recipe.last_run)


def test_a_recipe_whose_head_leaves_something_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# what: mine\n# last run: never\ndata: {}\n# needs: too late\n")
    with pytest.raises(ConfigError, match="lack `# needs: …`"):
        read_recipe(path)


def test_quickstart_passes_every_check_before_it_is_prepared(tmp_path: Path) -> None:
    resolved = resolve_config(RECIPES / "quickstart.yaml", STANDINS, run_dir=str(tmp_path / "run"))
    assert resolved.plugins.reward is not None
    assert resolved.config.data.train_files == (str(tmp_path / "run/prepared/train.jsonl"),)
    assert list(tmp_path.iterdir()) == []


def test_quickstart_prepares_what_it_reads(run_dir: Path) -> None:
    resolved = resolve_config(RECIPES / "quickstart.yaml", STANDINS, run_dir=str(run_dir))
    config, data = resolved.config, open_run(resolved)
    assert data.steps.steps == config.trainer.total_training_steps
    assert len(data.validation) == toy.HELD_OUT
    assert isinstance(data.train, PromptSource)
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
