"""A run trained through vLLM: what it samples is what the trainer computes, and the next step uses the new weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from driving import train
from shared import end_all

if TYPE_CHECKING:
    from pathlib import Path

FP32_CLOSE = 1e-4


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "runtime"), [pytest.param("sync", "ray", marks=pytest.mark.slow), ("fully_async", "local")]
)
def test_rollout_and_trainer_agree_on_every_token_of_every_version(tmp_path: Path, mode: str, runtime: str) -> None:
    end_all()  # the engines that other tests share would compete for the cores
    run = train(
        tmp_path / "run",
        "actor_rollout_ref.rollout.name=vllm",
        f"trainer.mode={mode}",
        f"runtime={runtime}",
        *(["async_training.max_staleness=null"] if mode == "sync" else []),
        "trainer.total_training_steps=4",
        "trainer.val_before_train=false",
        limit_s=240.0,
    )
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    diffs = [row["rollout/logprob_diff_same_version"] for row in rows if "rollout/logprob_diff_same_version" in row]
    assert diffs
    assert max(diffs) < FP32_CLOSE, diffs
    assert run.code == 0, run.output
    assert len(rows) >= 4
