"""The real control core on virtual time: bounds, accounting, failures."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from fakes import FakeAgents, FakeCheckpoint, FakeData, FakeServers, FakeWorkers, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_contracts.errors import RunFailed, WaitTimeout, WeightSyncError
from verl_contracts.failures import FailureRecord
from verl_contracts.rollout import Replica
from verl_contracts.samples import GroupUid
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.virtual import VirtualClock, run_virtual
from verl_contracts.tokens import SamplingParams
from verl_contracts.tracking import Tracker
from verl_contracts.training import Schedule
from verl_trainers.core.admission import BoundedAdmission
from verl_trainers.core.loop import LoopLimits, LoopParts, LoopReport, TrainingLoop
from verl_trainers.core.producer import GroupRules
from verl_trainers.core.store import GroupStore
from verl_trainers.core.validation import Validator

UNITS = SamplingParams(max_tokens=4)


def one_second(rng: random.Random) -> float:
    return 1.0


class Bench:
    """A loop with its stand-ins."""

    def __init__(
        self,
        *,
        k: int,
        batch: int,
        steps: int,
        sync_every: int = 1,
        n: int = 2,
        rows: int | None = None,
        seed: int = 0,
        sample_s: Callable[[random.Random], float] = one_second,
        step_s: Callable[[random.Random], float] = one_second,
        unusable: str = "refill",
        max_unusable_ratio: float = 0.5,
        wait_s: float = 1e6,
        sync_limit_s: float = 1e6,
        sleep: bool = False,
        failures: AsyncIterator[FailureRecord] | None = None,
        validate: int = 0,
        test_freq: int = -1,
        trackers: Sequence[Tracker] = (),
        replicas: Sequence[Replica] = (),
    ) -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        self.clock = clock
        self.world = World(clock=clock, rng=random.Random(seed), sample_s=sample_s, step_s=step_s)
        self.events = RecordingEvents(clock)
        self.admission = BoundedAdmission(max_staleness=k, batch_groups=batch, total_steps=steps)
        self.checkpoint = FakeCheckpoint(self.world)
        self.servers = FakeServers(replicas)
        agents = FakeAgents(self.world)
        data = FakeData()
        prompts = tuple(prompt for _ in range(validate) if (prompt := data.next()) is not None)
        self.loop = TrainingLoop(
            parts=LoopParts(
                admission=self.admission,
                store=GroupStore(),
                data=FakeData(rows),
                agents=agents,
                servers=self.servers,
                checkpoint=self.checkpoint,
                workers=FakeWorkers(self.world),
                clock=clock,
                events=self.events,
                trackers=trackers,
                failures=failures,
                validator=Validator(
                    prompts=prompts,
                    agents=agents,
                    n=1,
                    sampling=UNITS,
                    limit_s=100.0,
                    clock=clock,
                    events=self.events,
                )
                if prompts
                else None,
            ),
            rules=GroupRules(
                n=n,
                sampling=UNITS,
                group_limit_s=1e6,
                max_unusable_ratio=max_unusable_ratio,
                unusable="raise" if unusable == "raise" else "train_rest" if unusable == "train_rest" else "refill",
            ),
            schedule=Schedule(max_staleness=k, sync_every=sync_every, sleep_while_training=sleep),
            total_steps=steps,
            batch_groups=batch,
            limits=LoopLimits(wait_s=wait_s, step_s=1e6, sync_s=sync_limit_s),
            test_freq=test_freq,
        )

    def check_accounts(self, report: LoopReport, *, k: int, batch: int, steps: int) -> None:
        """Every step trained `batch` groups within the bound; each admitted group was trained once or dropped."""
        per_step = Counter(step for step, _, _ in self.world.trained)
        assert per_step == dict.fromkeys(range(1, steps + 1), batch)
        for step, uid, oldest in self.world.trained:
            assert 0 <= step - 1 - oldest <= k, (step, uid, oldest)
        trained = [uid for _, uid, _ in self.world.trained]
        dropped = [str(event.fields["uid"]) for event in self.events.named("group.dropped")]
        admitted = [str(event.fields["uid"]) for event in self.events.named("group.admitted")]
        assert len(set(trained)) == len(trained)
        assert sorted(trained + dropped) == sorted(admitted)
        assert report.groups_trained == batch * steps
        assert report.final_version == steps
        assert self.admission.outstanding == 0


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    k=st.integers(0, 4),
    batch=st.integers(1, 4),
    steps=st.integers(1, 7),
    sync_gap=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(["even", "uniform", "heavy", "bimodal"]),
    speed=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    bad=st.sampled_from([0.0, 0.0, 0.15]),
    dead=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_no_schedule_breaks_the_bound_or_loses_a_group(
    k: int, batch: int, steps: int, sync_gap: int, seed: int, shape: str, speed: float, bad: float, dead: float
) -> None:
    def sample_s(rng: random.Random) -> float:
        if shape == "even":
            return 1.0
        if shape == "uniform":
            return rng.random()
        if shape == "heavy":
            return min(1000.0, rng.paretovariate(0.8))
        return rng.choice((0.1, 20.0))

    async def main() -> None:
        bench = Bench(
            k=k,
            batch=batch,
            steps=steps,
            sync_every=min(sync_gap, k + 1),
            seed=seed,
            sample_s=sample_s,
            step_s=lambda rng: speed * rng.random(),
            max_unusable_ratio=1.0,
        )
        choice = random.Random(seed + 1)
        broken = {row for row in range(500) if choice.random() < bad}
        killed = {row for row in range(500) if choice.random() < dead}
        bench.world.bad_group = lambda request: request.uid.row in broken
        bench.world.dead_group = lambda request: request.uid.row in killed and request.uid.attempt == 0
        report = await bench.loop.run()
        bench.check_accounts(report, k=k, batch=batch, steps=steps)

    run_virtual(main())


def test_selection_never_reaches_a_step_with_two_groups_due() -> None:
    """k = 2, one group a step: A, B, C admitted at version 0, B trained first, D admitted at 1."""
    a, b, c, d = (GroupUid(epoch=0, row=row) for row in range(4))
    admission = BoundedAdmission(max_staleness=2, batch_groups=1, total_steps=10)
    for uid in (a, b, c):
        admission.admit(uid)
    assert admission.room() == 0
    assert admission.finish(b, oldest_version=0)
    assert admission.select() == (b,)
    admission.trained((b,))
    admission.acknowledge(1)
    admission.admit(d)
    assert admission.finish(d, oldest_version=1)
    assert admission.select() is None, "training D would leave A and C both due in step 3"
    assert admission.blocking() == (a, c)
    assert admission.finish(a, oldest_version=0)
    assert admission.select() == (a,)


def test_a_group_too_stale_is_refused() -> None:
    admission = BoundedAdmission(max_staleness=0, batch_groups=1, total_steps=3)
    first, second = GroupUid(epoch=0, row=0), GroupUid(epoch=0, row=1)
    admission.admit(first)
    assert admission.finish(first, oldest_version=0)
    admission.trained((first,))
    admission.acknowledge(1)
    admission.admit(second)
    assert not admission.finish(second, oldest_version=0)
    assert admission.select() is None
    assert admission.blocking() == (second,)


def test_admission_state_survives_a_restore() -> None:
    admission = BoundedAdmission(max_staleness=2, batch_groups=2, total_steps=5)
    uids = [GroupUid(epoch=0, row=row) for row in range(6)]
    for uid in uids:
        admission.admit(uid)
    admission.finish(uids[3], oldest_version=0)
    admission.finish(uids[1], oldest_version=0)
    again = BoundedAdmission(max_staleness=2, batch_groups=2, total_steps=5)
    again.restore(admission.state())
    assert again.select() == admission.select() == (uids[1], uids[3])
    assert again.state() == admission.state()


@pytest.mark.parametrize("sleep", [False, True])
def test_sync_trains_step_s_with_version_s_minus_1(sleep: bool) -> None:
    async def main() -> None:
        bench = Bench(k=0, batch=3, steps=4, sleep=sleep)
        report = await bench.loop.run()
        bench.check_accounts(report, k=0, batch=3, steps=4)
        assert all(oldest == step - 1 for step, _, oldest in bench.world.trained)
        each = ["sleep", "wake"] if sleep else []
        expected = ["update 0"]
        for step in range(1, 5):
            expected += [*each, f"update {step}"]
        assert bench.checkpoint.calls == expected

    run_virtual(main())


def test_overlap_shortens_the_run_when_k_is_positive() -> None:
    async def wall(k: int) -> float:
        bench = Bench(k=k, batch=2, steps=10)
        await bench.loop.run()
        return bench.clock.now()

    assert run_virtual(wall(2)) < 0.7 * run_virtual(wall(0))


def test_a_heavy_tail_throws_nothing_away() -> None:
    async def main() -> None:
        bench = Bench(k=2, batch=5, steps=100, sample_s=lambda rng: min(50.0, rng.paretovariate(1.1)))
        report = await bench.loop.run()
        bench.check_accounts(report, k=2, batch=5, steps=100)
        assert report.groups_dropped == 0

    run_virtual(main())


def test_a_rollout_that_fails_for_good_fails_the_run_with_its_cause() -> None:
    async def main() -> None:
        bench = Bench(k=1, batch=2, steps=9)
        bench.world.dead_group = lambda request: request.uid.row == 5
        with pytest.raises(RunFailed, match=r"group 0-5-2 failed 3 times.*agent\[0\] on here: killed by signal 9"):
            await bench.loop.run()
        assert bench.loop.report.steps < 9

    run_virtual(main())


def test_groups_that_cannot_be_scored_stop_the_run_past_a_ratio() -> None:
    async def main() -> None:
        bench = Bench(k=1, batch=2, steps=9)
        bench.world.bad_group = lambda request: request.uid.row % 4 != 0
        with pytest.raises(RunFailed, match=r"groups were unusable, more than reward.max_unusable_ratio=0.5 allows"):
            await bench.loop.run()
        assert bench.loop.report.rejects

    run_virtual(main())


def test_why_groups_are_unusable_is_said_once_and_the_error_holds_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> str:
        bench = Bench(k=1, batch=4, steps=9)
        bench.world.bad_group = lambda request: True
        with pytest.raises(RunFailed, match=r"first failed: ValueError: x \(/loop\.py:7 in run\)") as caught:
            await bench.loop.run()
        assert bench.loop.report.groups_dropped >= 8
        assert caught.value.__cause__ is None, "one error that says it once"
        return "".join(traceback.format_exception(caught.value))

    assert "agent[0] on here: ValueError: x" in run_virtual(main())
    assert sum("was dropped" in row.getMessage() for row in caplog.records if row.levelname == "WARNING") == 1


def test_unusable_raise_stops_at_once() -> None:
    async def main() -> None:
        bench = Bench(k=0, batch=2, steps=3, unusable="raise")
        bench.world.bad_group = lambda request: request.uid.row == 1
        with pytest.raises(RunFailed, match=r"reward\.unusable=raise"):
            await bench.loop.run()

    run_virtual(main())


def test_data_that_ends_early_is_said_with_counts() -> None:
    async def main() -> None:
        bench = Bench(k=0, batch=4, steps=3, rows=10)
        with pytest.raises(RunFailed, match="the data ended before step 3 could be formed"):
            await bench.loop.run()
        assert bench.loop.report.steps == 2

    run_virtual(main())


def test_a_group_that_never_returns_is_named_at_the_limit() -> None:
    async def main() -> None:
        bench = Bench(k=0, batch=2, steps=3, wait_s=60.0, sample_s=lambda rng: 10_000.0)
        with pytest.raises(WaitTimeout, match="the batch of step 1, held by groups 0-0-0, 0-1-0"):
            await bench.loop.run()
        assert bench.clock.now() < 61.0

    run_virtual(main())


def test_a_sync_that_fails_ends_the_run_with_its_phase() -> None:
    async def main() -> None:
        bench = Bench(k=1, batch=2, steps=5)
        bench.world.sync_fails = lambda version: version == 3
        with pytest.raises(WeightSyncError, match="'transfer'"):
            await bench.loop.run()
        assert bench.loop.report.steps == 3

    run_virtual(main())


def test_a_dead_policy_worker_stops_the_wait_for_a_batch() -> None:
    async def main() -> None:
        async def failures() -> AsyncIterator[FailureRecord]:
            await asyncio.sleep(5.0)
            yield FailureRecord(role="policy", rank=1, node="n0", cause="killed by signal 9")
            await asyncio.sleep(1e9)

        bench = Bench(k=0, batch=2, steps=3, sample_s=lambda rng: 1000.0, failures=failures())
        with pytest.raises(RunFailed, match=r"policy\[1\] on n0: killed by signal 9"):
            await bench.loop.run()
        assert bench.clock.now() < 6.0

    run_virtual(main())


def test_validation_is_labelled_with_its_version_and_trains_nothing() -> None:
    async def main() -> None:
        bench = Bench(k=1, batch=2, steps=6, validate=3, test_freq=2)
        report = await bench.loop.run()
        bench.check_accounts(report, k=1, batch=2, steps=6)
        assert [row.version for row in report.validations] == [0, 2, 4, 6]
        assert all(row.scored == row.samples == 3 for row in report.validations)

    run_virtual(main())


def test_a_manager_that_ignores_its_deadline_is_named_at_the_limit() -> None:
    async def main() -> None:
        bench = Bench(k=1, batch=2, steps=5, sync_limit_s=30.0)
        bench.world.sync_s = 1e5
        with pytest.raises(WaitTimeout, match="the sync of version 0, held by FakeCheckpoint"):
            await bench.loop.run()
        assert bench.clock.now() < 40.0

    run_virtual(main())


def test_a_run_in_which_every_update_was_skipped_fails() -> None:
    async def main() -> None:
        bench = Bench(k=0, batch=2, steps=3)
        bench.world.updates = 0
        with pytest.raises(RunFailed, match="made 0 updates in 3 steps"):
            await bench.loop.run()

    run_virtual(main())


def test_steps_without_a_signal_are_said_at_the_first_and_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> LoopReport:
        bench = Bench(k=0, batch=2, steps=9)
        bench.world.zero_groups = lambda step: 1.0 if step in (3, 4, 7) else 0.5
        return await bench.loop.run()

    assert run_virtual(run()).steps_without_signal == 3
    first, last = (row.getMessage() for row in caplog.records if row.name == "verl_trainers.core.signal")
    assert first.startswith("step 3 has nothing to learn from")
    assert "rollout.n=2 " in first
    assert last.startswith("3 of 9 steps had nothing to learn from")


def test_a_run_that_learns_says_nothing_of_signals(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> LoopReport:
        return await Bench(k=0, batch=2, steps=3).loop.run()

    assert run_virtual(run()).steps_without_signal == 0
    assert [row for row in caplog.records if row.name == "verl_trainers.core.signal"] == []
