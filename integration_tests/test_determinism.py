"""Deterministic mode: the same bits from the same run, from both modes, and from any number of agent workers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from driving import train

EXACT = ("deterministic=true", "trainer.total_training_steps=8")
ASYNC_0 = ("trainer.mode=fully_async", "async_training.max_staleness=0")


def weights(out: Path, *overrides: str) -> str:
    run = train(out, *EXACT, *overrides)
    assert run.code == 0, run.output
    return hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(tmp_path_factory.mktemp("sync") / "run", "trainer.mode=sync", "runtime=local")


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.mode=sync", "runtime=local"),
        (*ASYNC_0, "runtime=local"),
        (*ASYNC_0, "runtime=local", "actor_rollout_ref.rollout.agent.num_workers=3"),
        (*ASYNC_0, "runtime=ray"),
        ("trainer.mode=sync", "runtime=ray", "actor_rollout_ref.rollout.agent.num_workers=3"),
    ],
    ids=["again", "fully_async", "three-workers", "fully_async-on-ray", "three-workers-on-ray"],
)
def test_the_final_weights_are_bit_equal(reference: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert weights(tmp_path / "run", *overrides) == reference


def test_another_seed_gives_other_bits(reference: str, tmp_path: Path) -> None:
    assert weights(tmp_path / "run", "trainer.mode=sync", "runtime=local", "trainer.seed=1") != reference
