"""Single keys: what becomes of each, and the command around it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from verl_contracts.errors import ConfigError
from verl_trainers.convert.command import PARTIAL, add_parser, run
from verl_trainers.convert.inputs import read_input
from verl_trainers.convert.rows import DEFAULT, ITSELF, MAPPED, UNKNOWN, UNSUPPORTED, Fate
from verl_trainers.convert.settings import is_legal
from verl_trainers.convert.tables import TABLE
from verl_trainers.convert.translate import Conversion, convert

if TYPE_CHECKING:
    from pathlib import Path

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ASYNC = ("python3", "-m", "verl.experimental.fully_async_policy.fully_async_main")
WHOLE = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=t.parquet",
    "actor_rollout_ref.model.path=model",
    f"{ROLLOUT}.n=4",
    "reward.custom_reward_function.path=r.py",
    "trainer.n_gpus_per_node=1",
)


def convert_words(*words: str) -> Conversion:
    return convert(read_input(words))


def fate_of(*words: str) -> Fate:
    """The fate of the last word's key."""
    return convert_words(*words).fates[-1][1]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ([f"{ACTOR}.kl_loss_type=low_var_kl"], f"{ACTOR}.kl_loss_type", "k3"),
        ([f"{ACTOR}.kl_loss_type=kl"], f"{ACTOR}.kl_loss_type", "k1"),
        ([f"{ACTOR}.policy_loss.loss_mode=vanilla"], f"{ACTOR}.policy_loss.loss_mode", "ppo_clip"),
        ([f"{ACTOR}.optim.warmup_style=cosine"], f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        (
            ["trainer.total_training_steps=200", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.05"],
            f"{ACTOR}.optim.lr_warmup_steps",
            10,
        ),
        ([f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16"], f"{ACTOR}.fsdp_config.model_dtype", "bfloat16"),
        (
            [f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.clip_ratio=0.1"],
            f"{ACTOR}.clip_ratio_low",
            0.1,
        ),
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"], f"{ACTOR}.ppo_max_token_len_per_gpu", 2048),
        (
            [
                "data.max_prompt_length=100",
                "data.max_response_length=300",
                f"{REF}.log_prob_micro_batch_size_per_gpu=3",
            ],
            f"{REF}.log_prob_max_token_len_per_gpu",
            1200,
        ),
        ([f"{ROLLOUT}.val_kwargs.top_k=-1"], f"{ROLLOUT}.val_kwargs.top_k", None),
        ([f"{ROLLOUT}.dtype=float"], f"{ROLLOUT}.dtype", "float32"),
        (
            [f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"],
            f"{ROLLOUT}.agent.default_agent_loop",
            "single_turn",
        ),
        ([f"{ROLLOUT}.checkpoint_engine.backend=naive"], f"{ROLLOUT}.checkpoint_engine.backend", "shm"),
        (["algorithm.adv_estimator=grpo_vectorized"], "algorithm.adv_estimator", "grpo"),
        (["algorithm.rollout_correction.bypass_mode=true"], f"{ACTOR}.old_log_prob", "rollout"),
        (["trainer.n_gpus_per_node=4", "trainer.nnodes=3"], "trainer.n_gpus_per_node", 12),
        (["trainer.test_freq=0"], "trainer.test_freq", -1),
        (["custom_reward_function.reward_kwargs.scale=2"], "reward.options.scale", 2),
        (["data.apply_chat_template_kwargs.a.b=1"], "data.chat_template_kwargs.a.b", 1),
        (["data.val_files=~/v.parquet"], "data.val_files", ["${oc.env:HOME}/v.parquet"]),
        (["data.trust_remote_code=true"], "actor_rollout_ref.model.trust_remote_code", True),
        (["trainer.v1.trainer_mode=sync"], "trainer.mode", "sync"),
        (["trainer.logger=[console]"], "trainer.logger", ["jsonl"]),
    ],
)
def test_value_when_a_key_is_translated(words: list[str], key: str, value: object) -> None:
    fate = fate_of(*words)
    assert (fate.kind, fate.values.get(key, "absent")) == (MAPPED, value)
    assert fate.why


@pytest.mark.parametrize(
    ("share", "every", "bound"), [(0, 1, 0), (0, 4, 3), (0.1, 4, 4), (0.5, 4, 5), (1, 4, 7), (1, 1, 1), (0.3, 10, 12)]
)
def test_bound_when_a_share_may_be_stale(share: float, every: int, bound: int) -> None:
    words = (f"async_training.trigger_parameter_sync_step={every}", f"async_training.staleness_threshold={share}")
    recipe = convert_words(*ASYNC, *words).recipe
    assert recipe["async_training.max_staleness"].value == bound
    assert recipe["async_training.sync_every"].value == every


def test_bound_when_nothing_is_said_in_fully_async() -> None:
    values = {key: line.value for key, line in convert_words(*ASYNC, *WHOLE).recipe.items()}
    assert (values["async_training.max_staleness"], values["async_training.sync_every"]) == (4, 4)
    assert values["data.train_batch_size"] == 256
    assert values[f"{ACTOR}.old_log_prob"] == "rollout"


@pytest.mark.parametrize(
    "words",
    [
        [f"{ACTOR}.use_dynamic_bsz=true"],
        [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
        [f"{ACTOR}.use_dynamic_bsz=true", f"{REF}.log_prob_micro_batch_size_per_gpu=4"],
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.ppo_max_token_len_per_gpu=9"],
        [f"{ACTOR}.clip_ratio=0.3"],
        [f"{ACTOR}.strategy=fsdp"],
        [f"{ACTOR}.fsdp_config.param_offload=false"],
        [f"{ACTOR}.optim._target_=verl.workers.config.FSDPOptimizerConfig"],
        ["algorithm.kl_ctrl.kl_coef=0.1"],
        ["algorithm.adv_estimator=grpo", "critic.optim.lr=1e-5"],
        ["algorithm.adv_estimator=grpo", "algorithm.gamma=0.9"],
        ["actor_rollout_ref.model.lora_alpha=32"],
        ["global_profiler.save_path=x"],
        [f"{ACTOR}.profiler.all_ranks=true"],
        ["trainer.save_freq=-1"],
        ["trainer.max_actor_ckpt_to_keep=2"],
        ["data.seed=null"],
        [f"{ROLLOUT}.name=???"],
    ],
)
def test_fate_when_a_key_changes_nothing(words: list[str]) -> None:
    fate = fate_of(*words)
    assert (fate.kind, fate.values) == (DEFAULT, {})
    assert fate.why


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([f"{ACTOR}.strategy=megatron"], "FSDP2"),
        ([f"{ACTOR}.fsdp_config.model_dtype=bf16"], "master weights"),
        ([f"{ACTOR}.fsdp_config.reshard_after_forward=false"], "sharded again"),
        ([f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], "number of steps"),
        ([f"{ACTOR}.kl_loss_type=abs"], "must be one of"),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], "must be one of"),
        ([f"{ACTOR}.ppo_epochs=many"], "whole number"),
        ([f"{ROLLOUT}.prompt_length=99"], "data.max_prompt_length"),
        (["data.train_files=hdfs://a/b.parquet"], "another file system"),
        (["trainer.logger=[console,swanlab]"], "swanlab"),
        (["trainer.device=npu"], "npu"),
        (["algorithm.adv_estimator=nobody"], "no estimator"),
        ([f"{ACTOR}.profiler.all_ranks=true", "global_profiler.tool=nsys"], "profiled"),
    ],
)
def test_reason_when_a_key_is_not_supported(words: list[str], why: str) -> None:
    fate = fate_of(*words)
    assert fate.kind == UNSUPPORTED
    assert why in fate.why


def test_fate_when_nobody_knows_the_key() -> None:
    fate = fate_of("data.train_fils=x")
    assert (fate.kind, fate.near) == (UNKNOWN, "data.train_files")


def test_fates_when_a_key_is_set_twice() -> None:
    first, second = convert_words("data.seed=1", "data.seed=2").fates
    assert (first[1].kind, second[1].values) == (DEFAULT, {"data.seed": 2})


@pytest.mark.parametrize("swap", [False, True])
def test_fates_when_two_keys_contradict(swap: bool) -> None:
    words = [f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=2.0"]
    conversion = convert_words(*(reversed(words) if swap else words))
    fates = {entry.key: fate for entry, fate in conversion.fates}
    assert fates[f"{ACTOR}.grad_clip"].kind == UNSUPPORTED
    assert conversion.recipe[f"{ACTOR}.grad_clip"].value == 0.5


def test_value_when_a_number_is_in_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo trainer.seed=$SEED data.train_files=$DIR/x.parquet")
    recipe = convert_words(str(script)).recipe
    assert recipe["trainer.seed"].value == "${oc.decode:${oc.env:SEED}}"
    assert recipe["data.train_files"].value == ["${oc.env:DIR}/x.parquet"]


def test_defaults_when_upstream_would_do_something_else() -> None:
    conversion = convert_words("data.train_files=t.parquet")
    values = {key: conversion.recipe[key].value for key in conversion.added}
    assert values == {
        "data.train_batch_size": 1024,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.old_log_prob": "recompute",
        f"{ACTOR}.fsdp_config.model_dtype": "bfloat16",
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.max_num_seqs": 256,
        f"{ROLLOUT}.free_cache_engine": True,
        "algorithm.adv_estimator": "grpo",
        "trainer.mode": "sync",
        "trainer.total_epochs": 30,
        "trainer.n_gpus_per_node": 8,
    }
    assert any("adv_estimator=gae" in line for line in conversion.missing)
    assert any("clip_ratio_c=3.0" in line for line in conversion.notes)


def test_targets_when_the_schema_is_asked() -> None:
    wrong = [
        (row.key, target)
        for row in TABLE
        for target in row.targets
        if not is_legal((row.key if target == ITSELF else target).replace("**", "x"))
    ]
    assert wrong == []


def test_rows_when_counted() -> None:
    keys = [row.key for row in TABLE]
    assert sorted(keys) == sorted(set(keys))
    assert all(row.why or row.becomes.startswith("same") for row in TABLE)


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["convert", *arguments]))


def test_command_when_all_is_converted(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*WHOLE) == 0
    out, err = capsys.readouterr()
    assert "train_files: t.parquet" in out or "train_files: [t.parquet]" in out
    assert err.startswith("6 keys: 6 same, 0 mapped")
    assert "NOT SUPPORTED" not in out
    assert "defaults not supported" not in out + err


def test_command_when_something_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipe.yaml"
    assert command(*WHOLE, "trainer.nobody=1", "--out", str(out)) == PARTIAL
    assert "trainer.nobody=1" in out.read_text(encoding="utf-8")
    printed, err = capsys.readouterr()
    assert printed == ""
    assert "6 same, 0 mapped, 0 satisfied by default, 0 not supported, 1 unknown" in err


def test_summary_when_a_default_of_verls_is_not_supported(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*WHOLE[1:]) == PARTIAL
    out, err = capsys.readouterr()
    assert out.count("NOT SUPPORTED") == 1
    for text in (out, err):
        assert "0 not supported, 0 unknown; 1 of verl's defaults not supported" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (f"{ROLLOUT}.name=nobody", "no engine is called 'nobody'; installed: torch"),
        ("algorithm.adv_estimator=nobody", "no estimator is called 'nobody'; installed: grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=nobody", "no policy loss is called 'nobody'; installed: ppo_clip"),
        ("trainer.logger=[nobody]", "no tracker is called 'nobody'; installed: jsonl, "),
        (f"{ROLLOUT}.checkpoint_engine.backend=[]", "no backend is called '[]'; installed: "),
    ],
)
def test_what_is_not_installed_when_named(word: str, text: str) -> None:
    assert fate_of(word).why.startswith(text)


@pytest.mark.parametrize("first", [True, False])
def test_command_when_it_is_strict(first: bool, tmp_path: Path) -> None:
    out = tmp_path / "recipe.yaml"
    flags = ("--strict", "--out", str(out))
    words = (*WHOLE, "trainer.nobody=1")
    assert command(*(flags + words if first else words + flags)) == PARTIAL
    assert not out.exists()


def test_command_when_the_input_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        command(str(tmp_path / "gone.sh"))
    with pytest.raises(ConfigError, match="cannot be written"):
        command(*WHOLE, "--out", str(tmp_path / "no" / "folder.yaml"))


def test_command_when_all_keys_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--keys") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(TABLE)
    assert f"| `{ACTOR}.ppo_epochs` | same |  |" in lines


def test_exit_code_when_nobody_reads() -> None:
    code = f"import sys; from verl_trainers.cli import main; sys.exit(main(['convert', *{WHOLE!r}, 'x.y=1']))"
    line = f'{sys.executable} -c "$CODE" | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", line], env={**os.environ, "CODE": code}, timeout=60, capture_output=True)
    assert done.returncode == PARTIAL
    assert b"Traceback" not in done.stderr


def test_import_when_the_parser_is_made() -> None:
    code = "import sys, verl_trainers.convert.command as c; print('torch' in sys.modules, 'omegaconf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
