"""Options of the engine: where they may stand, what is refused, and how many devices a replica takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest
from config_cases import GOOD, mistakes_of
from fakes import FakeServers

from verl_contracts.errors import ConfigError
from verl_contracts.rollout import RolloutSettings
from verl_contracts.training import ModePlan, Placement, Schedule, ScheduleRequest
from verl_trainers.config.build import leaf_keys
from verl_trainers.config.engine import ENGINE_OPTIONS, LOGPROB_DIFF_LIMITS, logprob_diff_limit
from verl_trainers.config.load import check_config, load_config
from verl_trainers.config.placing import build_rollout_settings, check_replicas, check_servers, whole_replicas
from verl_trainers.config.schema import RunConfig

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
VALUES: Mapping[str, object] = {
    "gpu_memory_utilization": 0.5,
    "enforce_eager": False,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 1,
    "data_parallel_size": 1,
}
STANDALONE = Placement(trainer_devices=1, hybrid=False, standalone_devices=8)


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, [*GOOD, *overrides])


def settings_of(*overrides: str, placement: Placement = STANDALONE) -> RolloutSettings:
    return build_rollout_settings(config_of(*overrides), placement)


def test_every_option_may_be_null_and_is_then_the_engines_own() -> None:
    assert set(VALUES) == set(ENGINE_OPTIONS)
    for name in ENGINE_OPTIONS:
        assert type(None) in get_args(leaf_keys()[f"{ROLLOUT}.{name}"])
    assert settings_of().engine_options == {}
    assert settings_of(VLLM, *(f"{ROLLOUT}.{name}=null" for name in ENGINE_OPTIONS)).engine_options == {}


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_an_option_reaches_the_engine_from_either_place(name: str) -> None:
    value = VALUES[name]
    for keys in ([name], [f"engine_kwargs.{name}"], [name, f"engine_kwargs.{name}"]):
        overrides = [VLLM, *(f"{ROLLOUT}.{key}={value}" for key in keys)]
        assert mistakes_of(*overrides) == []
        assert settings_of(*overrides, f"{ROLLOUT}.engine_kwargs.more=x").engine_options == {name: value, "more": "x"}


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_an_option_with_two_values_is_refused_by_both_its_keys(name: str) -> None:
    other = 0.25 if name == "gpu_memory_utilization" else 7
    (mistake,) = mistakes_of(VLLM, f"{ROLLOUT}.{name}={VALUES[name]}", f"{ROLLOUT}.engine_kwargs.{name}={other}")
    assert f"{ROLLOUT}.engine_kwargs.{name}: is {other}, and {ROLLOUT}.{name} is {VALUES[name]}" in mistake


@pytest.mark.parametrize("key", [*ENGINE_OPTIONS, "engine_kwargs.whatever"])
def test_the_embedded_engine_has_no_option(key: str) -> None:
    (mistake,) = mistakes_of(f"{ROLLOUT}.{key}={VALUES.get(key, 1)}")
    assert f"{ROLLOUT}.{key}: is an option of other engines; the embedded engine" in mistake
    assert mistakes_of(VLLM, f"{ROLLOUT}.{key}={VALUES.get(key, 1)}") == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["gpu_memory_utilization=0"], "gpu_memory_utilization", "must be > 0, got 0"),
        (["gpu_memory_utilization=1.01"], "gpu_memory_utilization", "must be ≤ 1, got 1.01"),
        (["gpu_memory_utilization=most"], "gpu_memory_utilization", "must be a number, got 'most'"),
        (["enforce_eager=1"], "enforce_eager", "must be true or false, got 1"),
        (["max_num_batched_tokens=0"], "max_num_batched_tokens", "must be ≥ 1, got 0"),
        (["data_parallel_size=0"], "data_parallel_size", "must be ≥ 1, got 0"),
        (["engine_kwargs=[1]"], "engine_kwargs", "must be options"),
        (["engine_kwargs.vllm.block_size=8"], "engine_kwargs.vllm", "engine_kwargs.engine_args"),
        (["data_parallel_size=2", "n_gpus_per_node=3"], "n_gpus_per_node", "1 * 2 = 2 (3 % 2 = 1)"),
        (
            ["tensor_model_parallel_size=2", "data_parallel_size=2", "n_gpus_per_node=6"],
            "n_gpus_per_node",
            f"{ROLLOUT}.tensor_model_parallel_size * {ROLLOUT}.data_parallel_size = 2 * 2 = 4 (6 % 4 = 2)",
        ),
        (["engine_kwargs.data_parallel_size=2", "n_gpus_per_node=3"], "n_gpus_per_node", "(3 % 2 = 1)"),
    ],
)
def test_a_wrong_option_is_refused_once_with_its_key(overrides: list[str], key: str, words: str) -> None:
    (mistake,) = mistakes_of(VLLM, *(f"{ROLLOUT}.{text}" for text in overrides))
    assert f"{ROLLOUT}.{key}: " in mistake
    assert words in mistake


# ---- devices


@pytest.mark.parametrize(
    ("overrides", "each", "replicas"),
    [
        ([], 1, 8),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], 2, 4),
        ([f"{ROLLOUT}.data_parallel_size=2"], 2, 4),
        ([f"{ROLLOUT}.engine_kwargs.data_parallel_size=2"], 2, 4),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=4"], 8, 1),
        ([f"{ROLLOUT}.engine_kwargs.data_parallel_size=two"], 1, 8),
    ],
)
def test_a_replica_takes_the_shards_of_each_of_its_copies(overrides: list[str], each: int, replicas: int) -> None:
    settings = settings_of(VLLM, *overrides)
    assert (settings.devices_per_replica, settings.num_replicas) == (each, replicas)


def test_replicas_are_given_whole_when_nobody_says_how_many_devices() -> None:
    four = [VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2"]
    one = replace(STANDALONE, standalone_devices=1)
    assert whole_replicas(config_of(*four), one).standalone_devices == 4
    assert whole_replicas(config_of(VLLM), one) == one
    said = config_of(*four, f"{ROLLOUT}.n_gpus_per_node=1")
    assert whole_replicas(said, one) == one
    hybrid = Placement(trainer_devices=4, hybrid=True)
    assert whole_replicas(config_of(*four), hybrid) == hybrid


def test_replicas_that_share_the_trainers_devices_divide_them() -> None:
    config = config_of(VLLM, f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.tensor_model_parallel_size=2")
    (mistake,) = check_replicas(config, Placement(trainer_devices=6, hybrid=True))
    assert mistake.key == f"{ROLLOUT}.tensor_model_parallel_size"
    assert "2 * 2 = 4 must divide trainer.n_gpus_per_node (6 % 4 = 2)" in mistake.text
    assert check_replicas(config, Placement(trainer_devices=8, hybrid=True)) == []
    (mistake,) = check_replicas(
        config_of(VLLM, f"{ROLLOUT}.data_parallel_size=4", f"{ROLLOUT}.checkpoint_engine.min_healthy=3"), STANDALONE
    )
    assert "is 3, and there are 2 replicas" in mistake.text


# ---- what the LLM server manager says


class RefusingServers(FakeServers):
    """Refuses each option, by its key among the options of the engine, and every model."""

    @classmethod
    def check(cls, settings: RolloutSettings, /) -> None:
        lines = [f"{ROLLOUT}.engine_kwargs.{name}: no such option" for name in settings.engine_options]
        raise ConfigError("\n".join([*lines, "actor_rollout_ref.model.path: there is none"]))


class OneMode:
    """Has the plan of `STANDALONE`."""

    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        return ModePlan(placement=replace(STANDALONE, standalone_devices=1), schedule=Schedule(max_staleness=0))


def test_what_the_engine_says_of_an_option_is_not_said_where_its_own_key_is_wrong() -> None:
    config = config_of(VLLM, f"{ROLLOUT}.gpu_memory_utilization=2", f"{ROLLOUT}.engine_kwargs.more=1")
    *found, model = check_servers(config, STANDALONE, RefusingServers)
    assert model.key == "actor_rollout_ref.model.path"
    assert [mistake.key for mistake in found] == [
        f"{ROLLOUT}.engine_kwargs.more",
        f"{ROLLOUT}.engine_kwargs.gpu_memory_utilization",
    ]
    assert all(mistake.follows_from([f"{ROLLOUT}.gpu_memory_utilization"]) for mistake in found)
    assert not any(mistake.follows_from([f"{ROLLOUT}.max_model_len"]) for mistake in found)


def test_a_model_that_is_yet_to_be_made_is_not_missed() -> None:
    assert check_servers(config_of("prepare=some.module:function"), STANDALONE, RefusingServers) == []
    assert len(check_servers(config_of(), STANDALONE, RefusingServers)) == 1


def test_a_whole_check_counts_the_devices_of_whole_replicas() -> None:
    own = [f"{ROLLOUT}.data_parallel_size=3", "runtime_options.num_cpus=3", "trainer.device=cpu", "runtime=local"]
    with pytest.raises(ConfigError) as caught:
        check_config(config_of(VLLM, *own, "trainer.mode=test_config_engine.OneMode"))
    assert "wanted 1 to train + 3 for replicas = 4 CPU, free 3 CPU" in str(caught.value)


# ---- how far log-probs may be apart


@pytest.mark.parametrize(
    ("replicas", "trainer", "limit"),
    [("float32", "float32", 1e-2), ("bfloat16", "float32", 0.2), ("float32", "bfloat16", 0.2)],
)
def test_the_limit_is_that_of_the_coarser_type_unless_it_is_set(replicas: str, trainer: str, limit: float) -> None:
    types = [f"{ROLLOUT}.dtype={replicas}", f"actor_rollout_ref.actor.fsdp_config.model_dtype={trainer}"]
    assert logprob_diff_limit(config_of(*types)) == limit
    assert logprob_diff_limit(config_of(*types, f"{ROLLOUT}.logprob_diff_limit=0.5")) == 0.5


def test_each_type_has_a_limit() -> None:
    assert set(LOGPROB_DIFF_LIMITS) == set(get_args(leaf_keys()[f"{ROLLOUT}.dtype"]))
