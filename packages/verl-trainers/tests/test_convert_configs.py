"""Whole configurations of upstream's verl, written from its documented keys, and what becomes of each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_trainers.config.build import build_run_config
from verl_trainers.config.check import check_relations
from verl_trainers.config.load import load_config
from verl_trainers.config.sources import Sources, read_sources
from verl_trainers.convert.inputs import Entry, Source, read_input
from verl_trainers.convert.render import counts, render_recipe, render_report
from verl_trainers.convert.rows import SAME, UNSUPPORTED
from verl_trainers.convert.translate import Conversion, convert

CONFIGS = Path(__file__).parent / "verl_configs"
RECIPES = Path(__file__).parents[1] / "src" / "verl_trainers" / "recipes"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What must come out of one file."""

    keys: int
    mode: str = "sync"
    lacks: frozenset[str] = frozenset()
    """Keys that are not supported as long as nobody builds them."""
    missing: tuple[str, ...] = ()
    """How the lines begin that say what is to be done by hand."""


CASES = {
    "grpo_sync.sh": Case(keys=29),
    "ppo_critic.sh": Case(
        keys=24,
        lacks=frozenset(
            {
                "algorithm.adv_estimator",
                "algorithm.gamma",
                "algorithm.lam",
                f"{ROLLOUT}.name",
                "critic.optim.lr",
                "critic.model.path",
                "critic.ppo_max_token_len_per_gpu",
                "trainer.critic_warmup",
            }
        ),
        missing=(f"{MODEL}.path: deepseek-ai/", f"{ROLLOUT}.n: must be ≥ 2", "reward.name: is not set"),
    ),
    "one_step_off.sh": Case(keys=27, mode="one_step_off"),
    "fully_async.sh": Case(keys=35, mode="fully_async", lacks=frozenset({f"{ROLLOUT}.checkpoint_engine.backend"})),
    "separate_async.yaml": Case(
        keys=27,
        mode="separate_async",
        lacks=frozenset(
            {
                "trainer.v1.trainer_mode",
                "trainer.v1.separate_async.hybrid_rollout.enable_switch",
                "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio",
            }
        ),
    ),
    "fsdp2.yaml": Case(keys=39),
    "lora.sh": Case(
        keys=18,
        lacks=frozenset(
            {
                f"{MODEL}.lora_rank",
                f"{MODEL}.lora_alpha",
                f"{MODEL}.target_modules",
                f"{ACTOR}.ppo_micro_batch_size",
            }
        ),
    ),
    "kl_in_loss.sh": Case(keys=20),
    "kl_in_reward.sh": Case(
        keys=18,
        lacks=frozenset(
            {
                "algorithm.use_kl_in_reward",
                "algorithm.kl_penalty",
                "algorithm.kl_ctrl.type",
                "algorithm.kl_ctrl.kl_coef",
                "algorithm.kl_ctrl.target_kl",
                "algorithm.kl_ctrl.horizon",
            }
        ),
    ),
    "dapo.sh": Case(
        keys=30,
        lacks=frozenset(
            {
                "data.truncation",
                "algorithm.filter_groups.enable",
                "algorithm.filter_groups.metric",
                "algorithm.filter_groups.max_num_gen_batches",
                f"{ACTOR}.clip_ratio_c",
                "reward_model.reward_manager",
                "reward_model.overlong_buffer.enable",
                "reward_model.overlong_buffer.len",
                "reward_model.overlong_buffer.penalty_factor",
            }
        ),
    ),
    "multi_turn.sh": Case(
        keys=20,
        lacks=frozenset(
            {
                f"{ROLLOUT}.name",
                f"{ROLLOUT}.multi_turn.enable",
                f"{ROLLOUT}.multi_turn.max_assistant_turns",
                f"{ROLLOUT}.multi_turn.format",
                f"{ROLLOUT}.multi_turn.tool_config_path",
                f"{ROLLOUT}.agent.default_agent_loop",
            }
        ),
    ),
    "vllm_parallel.sh": Case(
        keys=17,
        lacks=frozenset(
            {
                f"{ROLLOUT}.name",
                f"{ROLLOUT}.tensor_model_parallel_size",
                f"{ROLLOUT}.gpu_memory_utilization",
                f"{ROLLOUT}.max_num_batched_tokens",
                f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache",
            }
        ),
    ),
    "parquet_files.yaml": Case(keys=31, lacks=frozenset({"data.train_max_samples"})),
}


def convert_file(name: str) -> Conversion:
    return convert(read_input([str(CONFIGS / name)]))


def test_cases_when_the_folder_is_listed() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_fates_when_a_config_is_converted(name: str) -> None:
    case, conversion = CASES[name], convert_file(name)
    assert len(conversion.fates) == sum(counts(conversion).values()) == case.keys
    unsupported = {entry.key for entry, fate in conversion.fates if fate.kind == UNSUPPORTED}
    assert unsupported <= case.lacks  # what is built meanwhile leaves the list by itself
    assert counts(conversion)["unknown"] == 0
    assert all(fate.why or fate.kind == SAME for _, fate in conversion.fates)
    report = render_report(conversion)
    assert all(entry.key in report for entry, _ in conversion.fates)


@pytest.mark.parametrize("name", CASES)
def test_recipe_when_it_is_loaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    conversion = convert_file(name)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(render_recipe(conversion, name=name), encoding="utf-8")
    config, mistakes = build_run_config(read_sources(recipe))
    assert mistakes == []
    by_hand = [line for line in conversion.missing if not line.startswith("trainer.mode:")]
    relations = {str(mistake) for mistake in check_relations(config)}
    assert relations <= set(by_hand)
    assert all(any(line.startswith(begin) for begin in CASES[name].missing) for line in by_hand)
    assert len(by_hand) <= len(CASES[name].missing)
    mode = CASES[name].mode
    assert config.trainer.mode == mode or (
        config.trainer.mode == "fully_async" and f"mode {mode} is not" in str(conversion)
    )


def test_values_when_grpo_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(render_recipe(convert_file("grpo_sync.sh"), name="x"), encoding="utf-8")
    config = load_config(recipe)
    assert config.data.train_files == (f"{tmp_path}/data/arithmetic/train.parquet",)
    assert config.data.max_response_length == 768
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16 * (256 + 768)
    assert config.actor_rollout_ref.actor.old_log_prob == "recompute"
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == "bfloat16"
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.reward.custom_reward_function.name == "score"
    assert config.reward.options == {"strict": True}
    assert (config.trainer.n_gpus_per_node, config.trainer.total_epochs, config.trainer.test_freq) == (4, 15, 5)
    assert config.trainer.logger == ("jsonl",)


def test_values_when_fully_async_is_converted() -> None:
    values = {key: line.value for key, line in convert_file("fully_async.sh").recipe.items()}
    assert values["data.train_batch_size"] == 2 * 32
    assert values["async_training.sync_every"] == 4
    assert values["async_training.max_staleness"] == 4 - 1 + 2
    assert values["trainer.total_training_steps"] == 512 * 400 // 64
    assert values["trainer.test_freq"] == 2 * 4
    assert values["trainer.n_gpus_per_node"] == values[f"{ROLLOUT}.n_gpus_per_node"] == 16
    assert values[f"{ACTOR}.old_log_prob"] == "rollout"


def test_values_when_separate_async_is_converted() -> None:
    values = {key: line.value for key, line in convert_file("separate_async.yaml").recipe.items()}
    assert values["async_training.max_staleness"] == 3
    assert values["async_training.sync_every"] == 1
    assert values[f"{ACTOR}.optim.lr_warmup_steps"] == 30
    assert values[f"{ROLLOUT}.n_gpus_per_node"] == 8


def test_values_when_references_are_followed() -> None:
    values = {key: line.value for key, line in convert_file("fsdp2.yaml").recipe.items()}
    assert values[f"{ACTOR}.ppo_mini_batch_size"] == 32
    assert values[f"{ACTOR}.grad_clip"] == 0.5
    assert values[f"{ACTOR}.fsdp_config.model_dtype"] == "bfloat16"
    assert values[f"{ROLLOUT}.top_k"] is None


def own_recipes() -> list[Path]:
    return sorted(RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("path", own_recipes(), ids=lambda path: path.stem)
def test_own_recipe_when_it_is_converted(path: Path) -> None:
    conversion = convert(read_input([str(path)]))
    assert {fate.kind for _, fate in conversion.fates} == {SAME}
    assert (conversion.added, conversion.notes) == ((), ())


@pytest.mark.parametrize("name", CASES)
def test_conversion_when_it_is_repeated(name: str, tmp_path: Path) -> None:
    first = convert_file(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(render_recipe(first, name=name), encoding="utf-8")
    again = convert(read_input([str(path)]))
    assert {fate.kind for _, fate in again.fates} == {SAME}
    assert {key: line.value for key, line in again.recipe.items()} == {
        key: line.value for key, line in first.recipe.items()
    }


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(sorted(CASES)), seed=st.integers(0, 2**32))
def test_result_when_keys_are_shuffled(name: str, seed: int) -> None:
    source = read_input([str(CONFIGS / name)])
    entries = list(source.entries)
    random.Random(seed).shuffle(entries)
    straight = convert(source)
    shuffled = convert(
        Source(entries=tuple(entries), launched=source.launched, bases=source.bases, referred=source.referred)
    )
    assert (
        render_recipe(straight, name="x").partition("# Not converted")[0]
        == (render_recipe(shuffled, name="x").partition("# Not converted")[0])
    )
    assert {entry.key: fate for entry, fate in straight.fates} == {entry.key: fate for entry, fate in shuffled.fates}


KEYS = st.sampled_from(
    sorted({entry.key for name in CASES for entry in read_input([str(CONFIGS / name)]).entries} | {"no.such_key", "x"})
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2000), st.floats(-1, 1e6), st.text(max_size=8), st.just([]), st.just({})
)


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=12))
def test_counts_when_any_values_are_given(pairs: list[tuple[str, object]]) -> None:
    entries = tuple(Entry(key=key, value=value, place="argument") for key, value in pairs)
    conversion = convert(Source(entries=entries))
    assert sum(counts(conversion).values()) == len(pairs)
    config, mistakes = build_run_config(read_sources_of(conversion))
    assert mistakes == [], config


def read_sources_of(conversion: Conversion) -> Sources:
    tree = yaml.safe_load(render_recipe(conversion, name="x"))
    return Sources(tree=tree or {}, places={})
