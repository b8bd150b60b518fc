"""What replicas did during a step: numbers by hand, and a loop that waits for none of them."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest
from test_loop import Bench
from test_metrics import Rows

from verl_contracts.clock import Clock, Deadline
from verl_contracts.errors import ActorFailed
from verl_contracts.failures import FailureRecord
from verl_contracts.rollout import DEAD, INVALID, PAUSED, SERVING, Replica, ReplicaState, ReplicaStatus
from verl_contracts.testing.scripted import ScriptedReplica
from verl_contracts.testing.virtual import VirtualClock, run_virtual
from verl_contracts.tokens import GenerationRequest, SampleKey, SamplingParams
from verl_contracts.waits import WAITS
from verl_trainers.core.metric_table import describe
from verl_trainers.core.replica_metrics import ASK_LIMIT_S, ReplicaWatch, SeenStatus, replica_metrics

NOW = {"rollout/replicas", "rollout/running", "rollout/waiting"}
RATES = {"rollout/generated_tokens_per_s", "rollout/busy_share"}
ALL = NOW | RATES | {"rollout/prefix_cache_hit_share"}


def seen(
    at: float,
    *,
    state: ReplicaState = SERVING,
    running: int = 0,
    waiting: int = 0,
    generated: int = 0,
    prompt: int = 0,
    cached: int = 0,
    busy_s: float = 0.0,
) -> SeenStatus:
    status = ReplicaStatus(
        replica="r",
        state=state,
        version=1,
        running=running,
        waiting=waiting,
        generated_tokens=generated,
        busy_s=busy_s,
        prompt_tokens=prompt,
        cached_prompt_tokens=cached,
    )
    return SeenStatus(status=status, at=at)


def test_numbers_of_two_replicas_are_those_counted_by_hand() -> None:
    before = {
        "a": seen(10.0, generated=100, prompt=40, cached=30, busy_s=5.0),
        "b": seen(10.0, generated=50, prompt=10, busy_s=1.0),
    }
    now = {
        "a": seen(14.0, running=3, waiting=1, generated=500, prompt=140, cached=110, busy_s=8.0),
        "b": seen(12.0, state=PAUSED, running=2, generated=150, prompt=110, cached=20, busy_s=1.5),
    }
    assert replica_metrics(before, now) == {
        "rollout/replicas": 2.0,
        "rollout/running": 5.0,
        "rollout/waiting": 1.0,
        "rollout/generated_tokens_per_s": pytest.approx(400 / 4 + 100 / 2),
        "rollout/busy_share": pytest.approx((3 / 4 + 0.5 / 2) / 2),
        "rollout/prefix_cache_hit_share": pytest.approx((80 + 20) / (100 + 100)),
    }


def test_a_replica_that_was_started_anew_counts_from_0() -> None:
    before = {"a": seen(10.0, generated=1000, prompt=100, cached=5, busy_s=9.0)}
    now = {"a": seen(12.0, generated=60, prompt=200, cached=50, busy_s=0.5)}
    got = replica_metrics(before, now)
    assert got["rollout/generated_tokens_per_s"] == 30.0
    assert got["rollout/busy_share"] == 0.25
    assert got["rollout/prefix_cache_hit_share"] == 0.25, "200 prompt tokens are more than 100, and all of them are new"


def test_what_cannot_be_told_is_absent() -> None:
    assert replica_metrics({}, {}) == {}
    assert replica_metrics({"a": seen(1.0)}, {}) == {}, "none has answered"
    assert replica_metrics({}, {"a": seen(1.0, prompt=5)}).keys() == NOW, "a rate needs two answers"
    assert replica_metrics({"a": seen(1.0)}, {"a": seen(1.0, prompt=5)}).keys() == NOW
    assert replica_metrics({"a": seen(1.0, prompt=5)}, {"a": seen(2.0, prompt=5)}).keys() == NOW | RATES
    both = replica_metrics({"a": seen(1.0)}, {"a": seen(2.0, generated=7), "new": seen(2.0, generated=900)})
    assert both["rollout/generated_tokens_per_s"] == 7.0


def test_replicas_without_weights_do_not_count_and_a_share_is_never_above_1() -> None:
    before = {"a": seen(1.0), "b": seen(1.0), "c": seen(1.0)}
    now = {"a": seen(2.0, busy_s=1.25), "b": seen(2.0, state=INVALID), "c": seen(2.0, state=DEAD)}
    got = replica_metrics(before, now)
    assert got["rollout/replicas"] == 1.0
    assert got["rollout/busy_share"] == pytest.approx(1 / 3)


def test_every_name_is_in_the_table() -> None:
    assert {name for name in ALL if describe(name) is None} == set()


def serving(name: str, clock: Clock) -> ScriptedReplica:
    replica = ScriptedReplica(name, clock=clock)
    replica.commit(0, keep_cache=False)
    return replica


class OddReplica(ScriptedReplica):
    """Tells its status in its own way."""

    def __init__(self, name: str, *, clock: Clock, how: str) -> None:
        super().__init__(name, clock=clock)
        self.clock, self.how, self.asked = clock, how, 0
        self.commit(0, keep_cache=False)

    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        self.asked += 1
        if self.how == "hangs":
            await self.clock.sleep(1e9)
        if self.how == "is dead":
            raise ActorFailed(FailureRecord(role="replica", rank=1, node="here", cause="killed by signal 9"))
        if self.how == "is of another contract":
            return cast("ReplicaStatus", {"state": "serving"})
        if self.how == "is late":
            await self.clock.sleep(2.5)
        return await super().status(deadline=deadline)


def bench_with(*replicas: Replica, rows: Rows, steps: int = 8, k: int = 1, sleep: bool = False) -> Bench:
    return Bench(k=k, batch=2, steps=steps, sleep=sleep, trackers=(rows,), replicas=replicas)


@pytest.mark.parametrize(("k", "sleep"), [(0, False), (0, True), (2, False)])
def test_every_step_tells_what_the_replicas_did_in_it(k: int, sleep: bool) -> None:
    async def main() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        rows, fleet = Rows(), [serving("r0", clock), serving("r1", clock)]

        async def ask_on() -> None:
            for number in range(10_000):
                request = GenerationRequest(
                    request_id=str(number),
                    prompt_ids=(1, 2, 3, 4),
                    sampling=SamplingParams(max_tokens=4),
                    key=SampleKey(uid="0-0-0", sample=0, turn=0),
                )
                for replica in fleet:
                    await replica.generate(request, deadline=Deadline.after(clock, 100.0))

        asking = asyncio.create_task(ask_on())
        await bench_with(*fleet, rows=rows, k=k, sleep=sleep).loop.run()
        asking.cancel()
        assert sorted(rows.rows) == list(range(1, 9))
        for step, row in rows.rows.items():
            assert row.keys() >= ALL, f"step {step} lacks {ALL - row.keys()}"
            assert (row["rollout/replicas"], row["rollout/running"], row["rollout/waiting"]) == (2.0, 1.0, 0.0)
            assert row["rollout/generated_tokens_per_s"] == pytest.approx(100.0, rel=0.1), "a token takes 10 ms"
            assert row["rollout/prefix_cache_hit_share"] == 0.0

    run_virtual(main())


@pytest.mark.parametrize("how", ["hangs", "is dead", "is of another contract"])
def test_a_replica_that_tells_nothing_delays_no_step_and_is_named_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(*, odd: bool) -> tuple[float, dict[int, dict[str, float]], int]:
        clock = VirtualClock(asyncio.get_running_loop())
        rows, replica = Rows(), OddReplica("r1", clock=clock, how=how)
        bench = bench_with(serving("r0", clock), *([replica] if odd else []), rows=rows)
        await bench.loop.run()
        took = clock.now()
        assert WAITS.current() == ()
        assert len(asyncio.all_tasks()) == 1, "nothing is left behind"
        return took, rows.rows, replica.asked

    with caplog.at_level(logging.WARNING):
        took, rows, asked = run_virtual(run(odd=True))
    without, expected, _ = run_virtual(run(odd=False))
    assert (took, rows) == (without, expected)
    assert all(row["rollout/replicas"] == 1.0 for row in rows.values())
    warned = [row.getMessage() for row in caplog.records if "leave out replica r1" in row.getMessage()]
    assert len(warned) == 1, caplog.text
    if how == "hangs":
        assert 1 < asked <= 1 + took / ASK_LIMIT_S, "it is asked again when the last call is over"
    else:
        assert asked == 1 + len(rows), "once before the first step, and in each"


def test_a_late_answer_belongs_to_the_step_in_which_it_comes() -> None:
    async def main() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        rows = Rows()
        late = OddReplica("r0", clock=clock, how="is late")
        await bench_with(late, rows=rows, k=0).loop.run()
        told = [step for step, row in rows.rows.items() if row.keys() >= NOW]
        assert 0 < len(told) < 8
        assert late.asked > len(told)

    run_virtual(main())


def test_replicas_change_nothing_else_in_a_run() -> None:
    async def run(count: int) -> tuple[object, ...]:
        clock = VirtualClock(asyncio.get_running_loop())
        rows = Rows()
        bench = Bench(
            k=2,
            batch=2,
            steps=8,
            sample_s=lambda rng: rng.random(),  # no two at once, whose order would be open
            trackers=(rows,),
            replicas=[serving(f"r{rank}", clock) for rank in range(count)],
        )
        await bench.loop.run()
        rest = [{name: value for name, value in row.items() if name not in ALL} for row in rows.rows.values()]
        return rest, bench.world.trained, [(event.name, event.at) for event in bench.events.events], clock.now()

    assert run_virtual(run(3)) == run_virtual(run(0))


def test_without_replicas_there_is_nothing_to_tell() -> None:
    async def main() -> None:
        watch = ReplicaWatch(None, clock=VirtualClock(asyncio.get_running_loop()))
        watch.ask()
        assert watch.metrics() == {}
        await watch.close()
        rows = Rows()
        await bench_with(rows=rows).loop.run()
        assert not any(row.keys() & ALL for row in rows.rows.values())

    run_virtual(main())
