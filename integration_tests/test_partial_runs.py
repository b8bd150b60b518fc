"""Parts of a run: validation alone, generation alone, and training on what was generated, against the whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from driving import Finished, train

EXACT = (
    "trainer.mode=sync",
    "deterministic=true",
    "trainer.total_training_steps=1",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)


def weights(run: Finished) -> str:
    assert run.code == 0, run.output
    return hashlib.sha256((run.folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = train(tmp_path_factory.mktemp("saved") / "run", *EXACT, "runtime=local", "trainer.rollout_only=true")
    assert run.code == 0, run.output
    return run


def test_generating_only_saves_the_groups_and_trains_none(saved: Finished) -> None:
    summary = saved.summary
    assert (summary["part"], summary["groups_saved"], summary["groups_trained"], summary["updates"]) == (
        "rollout_only",
        4,
        0,
        0,
    )
    assert "4 groups saved" in saved.output
    assert sorted(path.name for path in saved.folder.glob("rollouts.*")) == ["rollouts.jsonl"]
    assert not (saved.folder / "model").exists()


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_training_on_saved_groups_makes_the_bits_of_one_synchronous_step(
    saved: Finished, runtime: str, tmp_path: Path
) -> None:
    files = f"data.rollout_files=[{saved.folder}/rollouts.jsonl]"
    apart = train(tmp_path / "apart", *EXACT, f"runtime={runtime}", files)
    whole = train(tmp_path / "whole", *EXACT, "runtime=local")
    assert weights(apart) == weights(whole)
    assert (
        weights(apart)
        != hashlib.sha256((apart.folder / "prepared" / "model" / "model.safetensors").read_bytes()).hexdigest()
    )
    assert apart.summary["part"] == "train_only"
    assert [event["fields"] for event in apart.events("step.begin")] == [
        event["fields"] for event in whole.events("step.begin")
    ]
    assert whole.events("replica.started")
    assert not apart.events("replica.started")


def test_saved_groups_train_several_steps_within_the_bound(tmp_path: Path) -> None:
    more = train(
        tmp_path / "more",
        *EXACT,
        "runtime=local",
        "trainer.rollout_only=true",
        "trainer.total_training_steps=3",
    )
    assert more.summary["groups_saved"] == 12, more.output
    files = f"data.rollout_files=[{more.folder}/rollouts.jsonl]"
    refused = train(tmp_path / "refused", *EXACT, "runtime=local", files, "trainer.total_training_steps=3")
    assert refused.code == 2
    assert "staleness 3 - 1 - 0 = 2, and trainer.mode=sync has the bound 0" in refused.output
    assert not refused.folder.exists()
    stale = ("trainer.mode=fully_async", "async_training.max_staleness=2", "trainer.total_training_steps=3")
    run = train(tmp_path / "stale", *EXACT, "runtime=local", files, *stale)
    assert run.code == 0, run.output
    assert (run.summary["steps"], run.summary["updates"], run.summary["max_staleness_seen"]) == (3, 3, 2)


def test_other_weights_than_those_that_sampled_are_refused(saved: Finished, tmp_path: Path) -> None:
    trained = train(tmp_path / "trained", *EXACT, "runtime=local")
    run = train(
        tmp_path / "other",
        *EXACT,
        "runtime=local",
        f"data.rollout_files=[{saved.folder}/rollouts.jsonl]",
        f"actor_rollout_ref.model.path={trained.folder}/model",
    )
    assert run.code == 2
    assert "weights in actor_rollout_ref.model.path" in run.output


def test_validating_only_scores_the_starting_weights(tmp_path: Path) -> None:
    held_out = 'data.val_files=["${run_dir}/prepared/val.jsonl"]'
    run = train(tmp_path / "run", *EXACT, "runtime=local", "trainer.val_only=true", held_out)
    assert run.code == 0, run.output
    summary = run.summary
    assert (summary["part"], summary["steps"], summary["val_versions"]) == ("val_only", 0, [0])
    assert isinstance(summary["val_last"], float)
    assert "nothing trained" in run.output
    assert not (run.folder / "model").exists()


@pytest.mark.parametrize("backend", ["shm", "naive", "gloo", "disk"])
def test_verifying_compares_each_replica_with_the_trainer_after_both_syncs(tmp_path: Path, backend: str) -> None:
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    run = train(tmp_path / "run", *EXACT, "runtime=local", "trainer.verify_only=true", f"{key}={backend}")
    assert run.code == 0, run.output
    assert (run.summary["part"], run.summary["steps"], run.summary["final_version"]) == ("verify_only", 0, 1)
    assert 0.0 < float(str(run.summary["logprob_diff_max"])) < 1e-5
    assert len(run.events("sync.end")) == 2
    assert "verified in" in run.output
    assert not (run.folder / "model").exists()


def test_verifying_finds_an_engine_that_keeps_a_part_of_the_first_weights(tmp_path: Path) -> None:
    engine = "actor_rollout_ref.rollout.name=outside_engines:KeepsAPart"
    run = train(tmp_path / "run", "runtime=local", "trainer.verify_only=true", engine)
    assert run.code == 1
    assert "at version 0" in run.output, "the first weights it takes"
    assert "rollout-0 holds version 1 to the byte, and its log-probs differ from the trainer's by" in run.output
