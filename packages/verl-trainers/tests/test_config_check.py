"""Rules between keys: each bad pair is refused with its key, its formula and its numbers; what is accepted can run."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from config_cases import GOOD, mistakes_of

from verl_contracts.errors import ConfigError
from verl_contracts.training import Placement
from verl_trainers.config.build import leaf_keys
from verl_trainers.config.check import check_files, check_relations
from verl_trainers.config.load import load_config, resolve_config
from verl_trainers.config.placing import check_resources
from verl_trainers.config.plugins import load_plugins
from verl_trainers.config.schema import RunConfig
from verl_trainers.config.steps import count_steps, total_steps

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, [*GOOD, *overrides])


def test_nothing_is_wrong_with_the_base() -> None:
    assert mistakes_of() == []


@pytest.mark.parametrize("key", sorted(key for key in leaf_keys() if key.endswith("_s")))
def test_a_limit_that_no_timer_can_hold_is_refused(key: str) -> None:
    longest = f"{ROLLOUT}.agent.sample_limit_s=1e8"
    assert mistakes_of(longest, f"{key}=1e8") == []
    (mistake,) = mistakes_of(longest, f"{key}=1e300")
    assert f"{key}: must be ≤ 1e+08 seconds, which is three years, got 1e+300" in mistake


def test_a_file_of_another_kind_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    file.touch()
    found = check_files(config_of(f"data.train_files=[{file}]", f"data.val_files=[{file}]"))
    text = f"{file}: unknown kind of file ''; use .jsonl or .parquet"
    assert [(mistake.key, mistake.text) for mistake in found if "model" not in mistake.key] == [
        ("data.train_files", text),
        ("data.val_files", text),
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["data.train_files=[]"], "data.train_files", "is required"),
        (["actor_rollout_ref.model.path="], "actor_rollout_ref.model.path", "null is not a value"),
        (["actor_rollout_ref.model.path=''"], "actor_rollout_ref.model.path", "is required"),
        (["actor_rollout_ref.model=null"], "actor_rollout_ref.model.path", "is required"),
        (["data.train_batch_size=0"], "data.train_batch_size", "≥ 1, got 0"),
        (["data.train_batch_size=-4"], "data.train_batch_size", "≥ 1, got -4"),
        (["data.train_batch_size=1.5"], "data.train_batch_size", "whole number"),
        (["data.max_response_length=0"], "data.max_response_length", "≥ 1"),
        (["data.train_files=7"], "data.train_files", "must be a list"),
        (["data.train_files=[7]"], "data.train_files", "must be text, got 7"),
        (["data.shuffle=1"], "data.shuffle", "true or false"),
        ([f"{ACTOR}.ppo_mini_batch_size=6"], f"{ACTOR}.ppo_mini_batch_size", "16 % 6 = 4"),
        ([f"{ACTOR}.ppo_mini_batch_size=32"], f"{ACTOR}.ppo_mini_batch_size", "16 % 32 = 16"),
        (["trainer.n_gpus_per_node=3"], "trainer.n_gpus_per_node", "16 * 8 = 128 (128 % 3 = 2)"),
        ([f"{ACTOR}.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=16"], "trainer.n_gpus_per_node", "8 % 16 = 8"),
        ([f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", "every advantage would be 0"),
        ([f"{ROLLOUT}.n=0"], f"{ROLLOUT}.n", "≥ 1"),
        ([f"{ROLLOUT}.max_model_len=100"], f"{ROLLOUT}.max_model_len", "512 + 512 = 1024, got 100"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=1023"], f"{ACTOR}.ppo_max_token_len_per_gpu", "= 1024, got 1023"),
        ([f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p", "old_log_prob=rollout"),
        ([f"{ROLLOUT}.top_k=20", f"{ACTOR}.old_log_prob=recompute"], f"{ROLLOUT}.top_k", "recomputed log-probs"),
        ([f"{ROLLOUT}.top_p=1.2"], f"{ROLLOUT}.top_p", "≤ 1, got 1.2"),
        ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p", "> 0, got 0"),
        ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature", "> 0"),
        ([f"{ROLLOUT}.temperature=1e-8"], f"{ROLLOUT}.temperature", "≥ 0.01, got 1e-08"),
        ([f"{ROLLOUT}.val_kwargs.temperature=1e-8"], f"{ROLLOUT}.val_kwargs.temperature", "0, which is greedy"),
        (["trainer.logger=[jsonl, jsonl]"], "trainer.logger", "names 'jsonl' more than once"),
        ([f"{ROLLOUT}.dtype=fp16"], f"{ROLLOUT}.dtype", "'float32', 'bfloat16'"),
        ([f"{ACTOR}.loss_agg_mode=token_mean"], f"{ACTOR}.loss_agg_mode", "did you mean 'token-mean'?"),
        ([f"{ACTOR}.optim.betas=[0.9]"], f"{ACTOR}.optim.betas", "list of 2, got 1"),
        ([f"{ACTOR}.optim.betas=[0.9, 1.0]"], f"{ACTOR}.optim.betas", "number 2 must be in [0, 1)"),
        ([f"{ACTOR}.optim.lr=-1"], f"{ACTOR}.optim.lr", "≥ 0"),
        ([f"{ACTOR}.optim.lr=.nan"], f"{ACTOR}.optim.lr", "finite"),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=9", "trainer.total_training_steps=8"],
            f"{ACTOR}.optim.lr_warmup_steps",
            "9 > 8",
        ),
        (["deterministic=true", f"{ROLLOUT}.name=vllm"], "deterministic", "got vllm"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], f"{ROLLOUT}.tensor_model_parallel_size", "must be 1"),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.n_gpus_per_node=3"],
            f"{ROLLOUT}.n_gpus_per_node",
            "3 % 2 = 1",
        ),
        (["reward.custom_reward_function.path=r.py"], "reward.name", "choose one"),
        (["reward.limit_s=500"], "reward.limit_s", "500 > 300"),
        (["reward.unusable=skip"], "reward.unusable", "'refill', 'train_rest', 'raise'"),
        (["reward.max_unusable_ratio=2"], "reward.max_unusable_ratio", "≤ 1"),
        (["trainer.test_freq=5"], "trainer.test_freq", "nothing to validate on"),
        (["trainer.test_freq=0"], "trainer.test_freq", "≥ 1, or -1"),
        (["trainer.total_epochs=0"], "trainer.total_epochs", "≥ 1"),
        (["trainer.total_training_steps=0"], "trainer.total_training_steps", "≥ 1"),
        (["async_training.pause_mode=stop"], "async_training.pause_mode", "'wait', 'abort', 'keep'"),
        (["async_training.sync_every=0"], "async_training.sync_every", "≥ 1"),
    ],
)
def test_a_wrong_value_is_refused_once_with_key_and_numbers(overrides: list[str], key: str, words: str) -> None:
    found = mistakes_of(*overrides)
    assert len(found) == 1, found
    assert f"{key}: " in found[0]
    assert words in found[0]


def test_all_mistakes_are_shown_at_once() -> None:
    found = mistakes_of("data.seed=x", f"{ROLLOUT}.n=0", "trainer.tset_freq=1", "reward.limit_s=0")
    assert len(found) == 4


def test_a_rule_says_nothing_about_a_value_that_is_broken_itself() -> None:
    assert len(mistakes_of("data.train_batch_size=lots", f"{ACTOR}.ppo_mini_batch_size=6")) == 1


@pytest.mark.parametrize("mini", [-1, 0, 1, 2, 3, 4, 6, 8, None])
def test_batch_arithmetic_accepts_exactly_equal_shares(mini: int | None) -> None:
    base = config_of()
    parts = base.actor_rollout_ref
    for batch, n, ranks in itertools.product((-1, 0, 1, 4, 6), (0, 2, 3), (0, 1, 2, 3)):
        config = replace(
            base,
            data=replace(base.data, train_batch_size=batch),
            trainer=replace(base.trainer, n_gpus_per_node=ranks),
            actor_rollout_ref=replace(
                parts,
                rollout=replace(parts.rollout, n=n),
                actor=replace(parts.actor, ppo_mini_batch_size=mini),
            ),
        )
        update = batch if mini is None else mini
        runs = min(batch, n, ranks, update) >= 1 and batch % update == 0 and update * n % ranks == 0
        assert (check_relations(config) == []) == runs, (batch, n, ranks, mini)


# ---- the end of the data


def test_a_tail_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("data.train_batch_size=4")
    with caplog.at_level(logging.INFO):
        assert total_steps(config, 10) == 2
    assert "2 full steps" in caplog.text
    assert "1 * 10 // 4 = 2" in caplog.text
    assert "a tail of 2 prompts is left out" in caplog.text


def test_data_are_repeated_when_steps_are_asked_for() -> None:
    count = count_steps(config_of("data.train_batch_size=4", "trainer.total_training_steps=10"), 10)
    assert (count.steps, count.epochs, count.tail) == (10, None, 0)
    assert "40 prompts" in count.message
    assert "4 times" in count.message


def test_a_batch_that_would_hold_a_prompt_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 prompts a step, and there are 10.*lower it, or add data"):
        count_steps(config_of("data.train_batch_size=12", "trainer.total_training_steps=10"), 10)


@pytest.mark.parametrize(("rows", "words"), [(3, r"1 \* 3 // 4 = 0"), (0, "no usable row")])
def test_no_step_is_an_error(rows: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        count_steps(config_of("data.train_batch_size=4"), rows)


def test_a_warm_up_longer_than_the_steps_that_follow_from_the_data_is_refused() -> None:
    own = ["data.train_batch_size=4", f"{ACTOR}.optim.lr_warmup_steps=3"]
    with pytest.raises(ConfigError, match=r"lr_warmup_steps: must be ≤ .* \(3 > 2\).*1 \* 10 // 4 = 2") as caught:
        count_steps(config_of(*own), 10)
    assert f"set {ACTOR}.optim.lr_warmup_steps=0;" in str(caught.value)
    assert count_steps(config_of(*own), 12).steps == 3
    assert count_steps(config_of(*own, "trainer.rollout_only=true"), 10).steps == 2


def test_a_warm_up_longer_than_the_run_names_its_fix_and_hinders_only_training() -> None:
    own = [f"{ACTOR}.optim.lr_warmup_steps=30", "trainer.total_training_steps=25"]
    (mistake,) = check_relations(config_of(*own))
    assert mistake.text.endswith(f"set {ACTOR}.optim.lr_warmup_steps=2")
    for part in (["trainer.rollout_only=true"], ["trainer.val_only=true", "data.val_files=[v.jsonl]"]):
        assert check_relations(config_of(*own, *part)) == []


# ---- files and resources


def test_files_that_are_not_there_are_named_unless_they_are_yet_to_be_made(tmp_path: Path) -> None:
    made = tmp_path / "prepared"
    config = config_of(
        f"data.train_files=[{made}/a.jsonl]", f"data.val_files=[{tmp_path}/b.jsonl]", "prepare=some.module:function"
    )
    assert [m.key for m in check_files(config, prepared=made)] == ["data.val_files", "actor_rollout_ref.model.path"]
    assert len(check_files(config)) == 3


def test_devices_that_this_machine_lacks_are_counted() -> None:
    config = replace(config_of("trainer.device=cpu"), runtime_options={})
    (mistake,) = check_resources(config, Placement(trainer_devices=1000, hybrid=False, standalone_devices=24))
    assert "wanted 1000 to train + 24 for replicas = 1024 CPU, free " in mistake.text
    assert "(this machine's cores)" in mistake.text
    assert check_resources(config, Placement(trainer_devices=1, hybrid=True)) == []
    elsewhere = replace(config, runtime_options={"address": "auto"})
    assert check_resources(elsewhere, Placement(trainer_devices=1000, hybrid=True)) == []
    told = replace(config, runtime_options={"num_cpus": 3})
    assert check_resources(told, Placement(trainer_devices=1, hybrid=False, standalone_devices=2)) == []
    (mistake,) = check_resources(told, Placement(trainer_devices=2, hybrid=False, standalone_devices=2))
    assert "free 3 CPU (runtime_options.num_cpus)" in mistake.text


# ---- plug-ins


PLUGIN_KEYS = (
    "runtime",
    "trainer.mode",
    "algorithm.adv_estimator",
    "reward.name",
    "trainer.logger",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ROLLOUT}.llm_server_manager_class",
    f"{ROLLOUT}.checkpoint_manager_class",
    f"{ROLLOUT}.checkpoint_engine.backend",
    f"{ROLLOUT}.agent.agent_loop_manager_class",
    f"{ROLLOUT}.agent.default_agent_loop",
)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_such_module.Thing", "no_such_module"),
        ("config_cases.GOOD", "GOOD"),
        ("config_cases:Missing", "Missing"),
        ("no-such-name", "no-such-name"),
        ("fractions.Fraction", "Fraction"),
    ],
)
def test_every_plug_in_that_cannot_be_used_is_named_with_its_key(spec: str, words: str) -> None:
    plugins, mistakes = load_plugins(config_of(*(f"{key}={spec}" for key in PLUGIN_KEYS)))
    assert plugins is None
    for key in PLUGIN_KEYS:
        (mistake,) = [m for m in mistakes if str(m).startswith(f"{key}: ")]
        assert words in str(mistake)


def test_options_of_a_reward_are_checked_by_building_it(tmp_path: Path) -> None:
    _, mistakes = load_plugins(config_of("reward.options={chekc: true}"))
    assert any("reward.options.chekc" in str(mistake) for mistake in mistakes)
    file = tmp_path / "reward.py"
    file.write_text("def score(): pass\nraise RuntimeError('no key')\n")
    own = ["reward.name=null", f"reward.custom_reward_function.path={file}"]
    _, mistakes = load_plugins(config_of(*own))
    assert any("RuntimeError: no key" in str(mistake) for mistake in mistakes)
    file.write_text("def score(): pass\n")
    _, mistakes = load_plugins(config_of(*own))
    assert any("no function 'compute_score'" in str(mistake) for mistake in mistakes)


def test_prepare_must_name_a_function() -> None:
    for spec in ("nonsense", "no_such_module:prepare", "config_cases:nothing"):
        with pytest.raises(ConfigError, match="prepare: "):
            resolve_config(None, [*GOOD, f"prepare={spec}"])


def test_relations_hold_for_a_config_built_in_python() -> None:
    assert [m.key for m in check_relations(RunConfig())] == [
        "data.train_files",
        "actor_rollout_ref.model.path",
        "reward.name",
    ]
