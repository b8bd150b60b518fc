"""The metrics: their values by hand, their names against the table, and the page made of it."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_loop import Bench
from worker_cases import make_batch, make_model, make_sample, make_settings

from verl_contracts.clock import SystemClock
from verl_contracts.runtime import PayloadRef
from verl_contracts.samples import FAILED, SCORED, GroupResult, GroupUid, SampleResult
from verl_contracts.testing.virtual import run_virtual
from verl_contracts.tracking import RunEnd, TrackedRun, reduce_metrics
from verl_contracts.training import StepContext, TrainSample
from verl_trainers.config.schema import ActorConfig, OptimConfig
from verl_trainers.core.metric_table import ALWAYS, METRICS, describe, render
from verl_trainers.core.metrics import GroupMetrics, RunCounters, StepClock
from verl_trainers.workers.engine import FsdpEngine

PACKAGE = Path(__file__).resolve().parents[1]


class Rows:
    """Keeps what the loop logs."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def start(self, run: TrackedRun, /) -> None:
        raise AssertionError("the loop starts no tracker")

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def close(self, end: RunEnd, /) -> None:
        raise AssertionError("the loop closes no tracker")


def sample(
    index: int,
    score: float | None,
    *,
    tokens: int = 7,
    trained: int = 4,
    oldest: int = 3,
    truncated: bool = False,
    metrics: Mapping[str, float] | None = None,
) -> SampleResult:
    return SampleResult(
        index=index,
        outcome=SCORED if score is not None else FAILED,
        score=score,
        payload=PayloadRef(num_bytes=0) if score is not None else None,
        num_tokens=tokens,
        num_trained=trained,
        versions=(oldest, oldest + 1),
        truncated=truncated,
        seconds=2.0,
        metrics=metrics or {},
    )


def test_numbers_of_a_batch_are_those_counted_by_hand() -> None:
    groups = (
        GroupResult(
            uid=GroupUid(epoch=0, row=0),
            samples=(sample(0, 1.0, tokens=10, trained=4, metrics={"turns": 3.0}), sample(1, 0.0, truncated=True)),
        ),
        GroupResult(uid=GroupUid(epoch=0, row=1), samples=(sample(0, 0.5, trained=6, oldest=4), sample(1, None))),
    )
    numbers = GroupMetrics.of(groups, step=6, bound=3)
    assert numbers.as_dict() == {
        "reward": 0.5,
        "reward/std": pytest.approx(math.sqrt(0.5 / 3)),
        "prompt_length/mean": pytest.approx((6 + 3 + 1) / 3),
        "prompt_length/max": 6.0,
        "response_length/mean": pytest.approx((4 + 4 + 6) / 3),
        "response_length/max": 6.0,
        "truncated": pytest.approx(1 / 3),
        "seconds/sample": 2.0,
        "staleness/max": 2.0,
        "staleness/mean": pytest.approx(5 / 3),
        "staleness/0": 0.0,
        "staleness/1": 1.0,
        "staleness/2": 2.0,
        "staleness/3": 0.0,
        "sample/turns": 3.0,
    }
    assert numbers.max_staleness == 2


def test_a_batch_without_samples_has_finite_numbers() -> None:
    numbers = GroupMetrics.of((), step=1, bound=0)
    assert all(math.isfinite(value) for value in numbers.as_dict().values())
    assert numbers.max_staleness == 0


def test_counters_account_for_every_group_and_token() -> None:
    produced = Counter(
        {
            "admitted": 20,
            "dropped": 4,
            "dropped: unusable": 3,
            "dropped: stale": 1,
            "samples: failed": 5,
            "samples: scored": 60,
            "discarded tokens": 25,
        }
    )
    counters = RunCounters(groups_trained=10, tokens_trained=75, process_failures=2)
    assert counters.as_dict(produced, ready=2) == {
        "groups_outstanding": 6.0,
        "groups_in_play": 4.0,
        "groups_ready": 2.0,
        "groups_dropped": 4.0,
        "useful_tokens": 0.75,
        "discards/unusable": 3.0,
        "discards/stale": 1.0,
        "discards/infrastructure": 0.0,
        "failures/failed": 5.0,
        "failures/timed_out": 0.0,
        "failures/abstained": 0.0,
        "failures/processes": 2.0,
    }
    assert RunCounters().as_dict(Counter(), ready=0)["useful_tokens"] == 1.0


def test_laps_add_up_and_name_their_parts() -> None:
    class Clock(SystemClock):
        time = 10.0

        def now(self) -> float:
            return self.time

    clock = Clock()
    step = StepClock(clock)
    for name, until, parts in (("wait", 11.0, None), ("update", 14.0, {"fetch": 0.5}), ("sync", 14.5, {})):
        clock.time = until
        step.lap(name, parts=parts)
    assert step.as_dict() == {
        "seconds/step": 4.5,
        "seconds/wait": 1.0,
        "seconds/update": 3.0,
        "seconds/update/fetch": 0.5,
        "seconds/sync": 0.5,
    }


LOOP = {
    row.name
    for row in METRICS
    if row.present == ALWAYS and "{" not in row.name and not row.name.startswith(("actor/", "advantage/"))
}
"""What every step has whatever the policy workers report."""


@pytest.mark.parametrize(("k", "sync_every", "sleep"), [(0, 1, False), (0, 1, True), (2, 1, False), (3, 2, False)])
def test_every_step_of_every_schedule_has_them_all_and_no_name_is_unknown(k: int, sync_every: int, sleep: bool) -> None:
    async def main() -> None:
        rows = Rows()
        bench = Bench(k=k, batch=2, steps=4, sync_every=sync_every, sleep=sleep, validate=2, trackers=(rows,))
        await bench.loop.run()
        assert sorted(rows.rows) == [0, 1, 2, 3, 4]
        for step in (1, 2, 3, 4):
            got = rows.rows[step]
            assert got.keys() >= LOOP, f"step {step} lacks {sorted(LOOP - got.keys())}"
            assert {f"staleness/{versions}" for versions in range(k + 1)} <= got.keys()
            assert ("seconds/sync" in got) == (step % sync_every == 0)
            assert ("seconds/sleep" in got) == ("seconds/wake" in got) == sleep
            assert got["groups_outstanding"] == got["groups_in_play"] + got["groups_ready"]
            assert got["seconds/step"] == pytest.approx(
                sum(value for name, value in got.items() if name.startswith("seconds/") and name.count("/") == 1)
                - got["seconds/step"]
                - got["seconds/sample"]
            )
        assert rows.rows[4]["groups_outstanding"] == 0
        assert {name for row in rows.rows.values() for name in row if describe(name) is None} == set()
        assert "val/score" in rows.rows[0]

    run_virtual(main())


def test_what_is_thrown_away_is_counted_by_its_reason() -> None:
    async def main() -> None:
        rows = Rows()
        bench = Bench(k=1, batch=2, steps=6, trackers=(rows,))
        bench.world.bad_group = lambda request: request.uid.row == 3
        bench.world.dead_group = lambda request: request.uid.row == 4 and request.uid.attempt == 0
        await bench.loop.run()
        last = rows.rows[6]
        assert (last["discards/unusable"], last["discards/infrastructure"], last["discards/stale"]) == (1, 1, 0)
        assert last["failures/failed"] == 2
        assert last["groups_dropped"] == 2
        assert last["useful_tokens"] == pytest.approx(6 * 2 * 2 * 2 / (6 * 2 * 2 * 2 + 2 * 2))

    run_virtual(main())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def measured(path: str, batch: list[TrainSample], actor: ActorConfig) -> dict[str, float]:
    """Return the metrics of one step on `batch`."""
    engine = FsdpEngine(make_settings(path, actor=actor))
    return reduce_metrics(engine.update(batch, StepContext(step=1, total_steps=10)).metrics)


def test_policy_workers_report_what_the_table_says_and_nothing_else(model: str) -> None:
    actor = ActorConfig(optim=OptimConfig(lr=1e-3), use_kl_loss=True, entropy_coeff=0.1, ppo_mini_batch_size=2)
    got = measured(model, make_batch(), actor)
    theirs = ("Policy", "Rollout against trainer")
    promised = {row.name for row in METRICS if row.section in theirs or row.name.startswith("advantage/")}
    assert {name for name in promised if "{" not in name} <= got.keys()
    assert {name for name in got if describe(name) is None} == set()


def test_share_of_groups_without_advantage_is_that_of_the_batch(model: str) -> None:
    batch = [
        dataclasses.replace(s, row=dataclasses.replace(s.row, score=0.5)) if s.row.uid == "0-1-0" else s
        for s in make_batch()
    ]
    for mini_batch in (None, 1, 2):
        actor = ActorConfig(optim=OptimConfig(lr=0.0), ppo_mini_batch_size=mini_batch)
        assert measured(model, batch, actor)["advantage/zero_groups"] == 0.25


def test_largest_gap_is_the_one_of_the_token_that_was_sampled_otherwise(model: str) -> None:
    actor = ActorConfig(optim=OptimConfig(lr=0.0), ppo_max_token_len_per_gpu=8, entropy_coeff=1e-9)
    engine = FsdpEngine(make_settings(model, actor=actor))
    plain = [make_sample(uid="a", sample=index, score=float(index), ids=[1, 2, 3, 4, 5], prompt=2) for index in (0, 1)]
    batch = []
    for index, (each, own) in enumerate(zip(plain, engine.log_probs(plain), strict=True)):
        shifted = own + torch.tensor([0.0, 0.0, 0.0, 0.5 * index, 0.25])
        batch.append(
            make_sample(
                uid="a",
                sample=index,
                score=float(index),
                ids=each.trajectories[0].ids,
                prompt=2,
                logprobs=shifted.tolist(),
            )
        )
    got = measured(model, batch, actor)
    assert got["rollout/logprob_diff_max"] == pytest.approx(0.5, abs=1e-5)
    assert got["rollout/logprob_diff"] == pytest.approx((0.25 + 0.5 + 0.25) / 6, abs=1e-5)


def test_names_are_unique_and_say_what_they_are() -> None:
    names = [row.name for row in METRICS]
    assert len(set(names)) == len(names)
    for row in METRICS:
        assert row.section, row
        assert row.unit, row
        assert row.meaning.endswith("."), row
        found = describe(row.name.replace("{", "").replace("}", ""))
        assert found is not None, row
    assert describe("staleness/max") is next(row for row in METRICS if row.name == "staleness/max")
    assert describe("staleness/7") is next(row for row in METRICS if row.name == "staleness/{versions}")
    assert describe("actor/clip_fraction_of_my_own") is not None
    assert describe("stalenes/max") is None


def test_the_page_is_what_the_table_says() -> None:
    assert (PACKAGE / "METRICS.md").read_text(encoding="utf-8") == render(), "run: python tools/metrics.py --write"


def test_the_readme_holds_when_it_is_read_from_a_wheel() -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    code = re.search(r'^python -c "([^"]+)"', text, flags=re.MULTILINE)
    assert code is not None
    done = subprocess.run([sys.executable, "-c", code[1]], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip("\n") == render().rstrip("\n")
