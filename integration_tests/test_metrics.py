"""Every installed mode records every metric of the table, and none that the table does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from driving import Finished, train

from verl_contracts.plugins import available, families
from verl_trainers.core.metric_table import ALWAYS, METRICS, describe

HIT_SHARE = "rollout/prefix_cache_hit_share"
OPTIONAL = {
    "actor/kl_loss",  # asked for below
    "seconds/sync",  # every step has one below
    "actor/entropy",  # the quickstart's entropy bonus needs all tokens
    "actor/clip_share",
    "actor/ratio",
    "actor/approx_kl",
    "rollout/logprob_diff",
    "rollout/logprob_diff_max",
    *(row.name for row in METRICS if row.section == "Replicas" and row.name != HIT_SHARE),
}
"""Metrics with a condition that holds in the runs of this test."""
EXPECTED = {row.name for row in METRICS if row.present == ALWAYS and "{" not in row.name} | OPTIONAL
STEPS = 2


def trackers(run: Finished) -> list[dict[str, object]]:
    """What the summary says of each tracker."""
    rows = json.loads((run.folder / "summary.json").read_text())["trackers"]
    assert isinstance(rows, list)
    return rows


@pytest.mark.parametrize("mode", sorted(available(families.TRAINER_MODE)))
def test_every_step_has_every_metric(mode: str, tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        f"trainer.mode={mode}",
        "runtime=local",
        f"trainer.total_training_steps={STEPS}",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    assert run.code == 0, run.output
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row.pop("step") for row in rows] == list(range(1, STEPS + 1))
    for step, row in enumerate(rows, start=1):
        assert row.keys() >= EXPECTED, f"step {step} lacks {sorted(EXPECTED - row.keys())}"
        assert [name for name in row if describe(name) is None] == []
        assert [name for name, value in row.items() if value is None] == [], "quickstart's numbers are finite"
        assert sum(row[f"staleness/{k}"] for k in range(int(row["staleness/max"]) + 1)) == 16
        assert row["useful_tokens"] == 1.0
        assert row["seconds/step"] >= row["seconds/update"] + row["seconds/sync"] + row["seconds/wait"]
        assert {"seconds/update/forward_backward", "seconds/sync/transfer"} <= row.keys()
    assert rows[0][HIT_SHARE] > 0.5, "samples of a group share their prompt"
    (tracker,) = trackers(run)
    assert tracker == {"name": "jsonl", "written": STEPS, "failed": 0, "lost": 0, "error": None}


def test_a_tracker_that_fails_or_blocks_harms_no_run(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        "trainer.mode=sync",
        "runtime=local",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[outside_trackers.Refusing,jsonl,outside_trackers.Stuck]",
        "trainer.logger_limit_s=1",
    )
    assert run.code == 0, run.output
    refusing, jsonl, stuck = trackers(run)
    assert (refusing["failed"], refusing["error"]) == (STEPS, "ConnectionError: no route to host")
    assert run.output.count("no route to host; training goes on") == 1
    assert (jsonl["written"], jsonl["failed"], jsonl["error"]) == (STEPS, 0, None)
    assert stuck["error"] == "TimeoutError: it took more than 1 s (trainer.logger_limit_s)"
    assert stuck["written"] == 0


def test_a_tracker_that_cannot_start_refuses_the_run(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "runtime=local", "trainer.logger=[outside_trackers.Unreachable]")
    assert run.code == 2, run.output
    assert "the tracker 'outside_trackers.Unreachable' did not start: no route to host" in run.output
    assert not (tmp_path / "run").exists()
