"""Unknown keys: what there is here instead of verl's own, and a guess only where it is a good one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from config_cases import build_tree, mistakes_of


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "trainer.save_freq=20",
            "verl's key, not supported here: the model is saved at the end; leave it out",
        ),
        ("trainer.resume_mode=auto", "verl's key, not supported here: each run begins anew; leave it out"),
        (
            "trainer.resume_from_path=/x",
            "verl's key, not supported here: each run begins anew; nearest: actor_rollout_ref.model.path, for weights "
            "alone",
        ),
        (
            "trainer.project_name=x",
            "verl's key, renamed: use trainer.logger_options.wandb.project or "
            "trainer.logger_options.mlflow.experiment (an option of each tracker)",
        ),
        (
            "custom_reward_function.path=x.py",
            "verl's key, renamed: use reward.custom_reward_function.path (the older name)",
        ),
    ],
)
def test_a_key_of_verls_is_told_what_becomes_of_it(override: str, text: str) -> None:
    key = override.partition("=")[0]
    assert mistakes_of(override) == [f"override {override!r}: {key}: {text}"]


def test_each_key_in_a_section_of_verls_is_told_for_itself() -> None:
    _, found = build_tree({"critic": {"optim": {"lr": 1.0}, "strategy": "fsdp"}})
    assert [text.partition(":")[0] for text in found] == ["critic.optim.lr", "critic.strategy"]
    assert all("there is no critic" in text for text in found)
    _, found = build_tree({"nobodys": {"a": 1, "b": 2}})
    assert [text.partition(":")[0] for text in found] == ["nobodys"]


@pytest.mark.parametrize("key", ["trainer.save_frq", "trainer.reseme", "trainer.zzz"])
def test_a_bad_guess_is_not_made(key: str) -> None:
    (text,) = mistakes_of(f"{key}=1")
    assert "did you mean" not in text
    assert "unknown key; known here: device, " in text


def test_the_tables_are_read_only_for_an_unknown_key() -> None:
    code = (
        "import sys\n"
        "from verl_trainers.config.load import load_config\n"
        "from verl_contracts.errors import ConfigError\n"
        "load_config(None, ['data.seed=1'])\n"
        "print('verl_trainers.convert.tables' in sys.modules)\n"
        "try:\n"
        "    load_config(None, ['data.sede=1'])\n"
        "except ConfigError:\n"
        "    print('verl_trainers.convert.tables' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]
