"""The printed configuration: where each value came from, and that it is read back to the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import STANDINS
from model_folders import TINY, write_model_folder

from verl_trainers.config.build import leaf_keys
from verl_trainers.config.load import ResolvedConfig, resolve_config
from verl_trainers.config.show import derived_values, render_with_sources


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    folder = tmp_path_factory.mktemp("show")
    write_model_folder(folder / "model", TINY)
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    recipe = folder / "mine.yaml"
    recipe.write_text(
        f"data:\n  train_files: [{folder}/train.jsonl]\n  chat_template_kwargs: {{a: 1}}\n"
        "  system_prompt: 'say ${run_dir}: \"yes\" # no'\n"
        "actor_rollout_ref:\n  actor:\n    optim:\n      lr: 1.0e-4\n"
    )
    overrides = [
        *STANDINS,
        f"actor_rollout_ref.model.path={folder}/model",
        "reward={name: copy, num_processes: 2}",
        "data.chat_template_kwargs.b=2",
        "data.system_prompt='a \\${b} # c'",
    ]
    return resolve_config(recipe, overrides, run_dir="/runs/1")


def line_of(resolved: ResolvedConfig, start: str) -> tuple[str, str]:
    (line,) = [line for line in render_with_sources(resolved).splitlines() if line.strip().startswith(f"{start}:")]
    head, _, origin = line.rpartition("  # ")
    return head.strip(), origin


@pytest.mark.parametrize(
    ("start", "head", "origin"),
    [
        ("lr", "lr: 0.0001", "mine.yaml:8"),
        ("grad_clip", "grad_clip: 1.0", "default"),
        ("num_processes", "num_processes: 2", "override 'reward={name: copy, num_processes: 2}'"),
        ("unusable", "unusable: refill", "default"),
        (
            "chat_template_kwargs",
            "chat_template_kwargs: {a: 1, b: 2}",
            "mine.yaml:3, override 'data.chat_template_kwargs.b=2'",
        ),
        ("max_staleness", "max_staleness: 0", "derived from trainer.mode=sync"),
        ("pause_mode", "pause_mode: wait", "derived from trainer.mode=sync"),
        ("ppo_mini_batch_size", "ppo_mini_batch_size: 16", "derived from data.train_batch_size"),
        ("max_model_len", "max_model_len: 1024", "derived from data.max_prompt_length + data.max_response_length"),
    ],
)
def test_each_value_says_where_it_came_from(resolved: ResolvedConfig, start: str, head: str, origin: str) -> None:
    assert line_of(resolved, start) == (head, origin)


def test_every_leaf_has_a_line_and_a_source(resolved: ResolvedConfig) -> None:
    lines = render_with_sources(resolved).splitlines()
    assert sum("  # " in line for line in lines) == len(leaf_keys())


def test_what_is_printed_is_read_back_to_the_same_run(resolved: ResolvedConfig, tmp_path: Path) -> None:
    file = tmp_path / "again.yaml"
    file.write_text(render_with_sources(resolved), encoding="utf-8")
    again = resolve_config(file, run_dir="/runs/2")
    assert again.plan == resolved.plan
    assert derived_values(again) == {}
    assert again.config.data == resolved.config.data
    assert render_with_sources(again).count("# default") == 0
