"""Each mode on each runtime: what the run folder says, and what the exported policy can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from driving import answer, train
from safetensors.torch import load_file

STEPS = 6
SUMMARY_KEYS = {
    "mode",
    "steps",
    "groups_trained",
    "groups_dropped",
    "reward_first",
    "reward_last",
    "val_first",
    "val_last",
    "samples_per_s",
    "max_staleness_seen",
    "final_version",
    "logprob_diff_mean",
    "wall_s",
}


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("fully_async", 2)])
def test_a_run_leaves_everything_behind_that_it_promises(mode: str, bound: int, runtime: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", f"trainer.mode={mode}", f"runtime={runtime}", f"trainer.total_training_steps={STEPS}")
    assert run.code == 0, run.output
    summary = run.summary
    assert set(summary) >= SUMMARY_KEYS
    assert summary["mode"] == mode
    assert summary["steps"] == summary["final_version"] == STEPS
    assert summary["groups_trained"] == STEPS * 4
    staleness = summary["max_staleness_seen"]
    assert isinstance(staleness, int)
    assert staleness <= bound
    difference = summary["logprob_diff_mean"]
    assert isinstance(difference, float)
    if mode == "sync":
        assert difference < 1e-4, "on-policy log-probs of rollout and trainer must agree"
    trained = [uid for row in run.events("step.begin") for uid in row["fields"]["uids"]]  # type: ignore[index]
    assert len(trained) == len(set(trained)) == STEPS * 4
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert all(row["spans"] for row in samples)
    assert len(answer(run.folder / "model", "3 3 3 3 =")) == 5


def test_replica_and_trainer_in_one_process_may_have_different_types(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        "runtime=local",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    )
    assert run.code == 0, run.output
    weights = load_file(run.folder / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}, "master weights stay float32"
