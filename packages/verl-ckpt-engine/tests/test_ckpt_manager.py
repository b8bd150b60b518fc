from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING

import pytest
from ckpt_hosts import ProcessReplica, SenderHost, SleepyReplica, ThreadReplica, eventually
from ckpt_transport import CLOCK, DictTarget, check_equal, named, sample_weights

from verl_ckpt_engine.manager import TransactionalManager
from verl_contracts.clock import Deadline
from verl_contracts.errors import ConfigError, PluginError, StateError, WaitTimeout, WeightSyncError
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.weights import PHASES, CheckpointSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.rollout import Capability


def after(seconds: float = 30) -> Deadline:
    return Deadline.after(CLOCK, seconds)


class Bench:
    """A manager over a sender and replicas of the test's choice."""

    def __init__(self, replicas: Sequence[ThreadReplica], **settings: object) -> None:
        self.sender = SenderHost(sample_weights())
        self.replicas = list(replicas)
        self.events = RecordingEvents()
        self.settings = CheckpointSettings(**{"bucket_bytes": 2048, "phase_limit_s": 10.0, **settings})  # type: ignore[arg-type]

    async def __aenter__(self) -> Bench:
        self.manager = await TransactionalManager.create(
            self.settings, sender=self.sender, replicas=self.replicas, clock=CLOCK, events=self.events
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close(deadline=after(10))
        for replica in self.replicas:
            assert not replica.paused, replica.replica_id
            replica.stop()
        self.sender.stop()
        assert named() == []


async def test_sync_brings_every_replica_to_the_version() -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1")]) as bench:
        assert bench.manager.versions() == {"r0": None, "r1": None}
        report = await bench.manager.update_weights(0, deadline=after())
        assert [(sync.replica, sync.committed, sync.phase) for sync in report.replicas] == [
            ("r0", True, "close"),
            ("r1", True, "close"),
        ]
        assert tuple(report.seconds) == PHASES
        assert report.num_bytes == bench.sender.source.manifest(0).num_bytes
        assert report.replicas[0].tensors == len(bench.sender.source.weights)
        assert report.changed
        assert bench.manager.versions() == {"r0": 0, "r1": 0}
        for replica in bench.replicas:
            check_equal(replica.loaded, bench.sender.source.weights)
            assert replica.calls == ["pause:abort", "commit:False", "resume"]
        assert bench.sender.closed == 1


async def test_events_tell_the_sync_in_order() -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        await bench.manager.update_weights(4, deadline=after())
        assert bench.events.names() == ["sync.begin", *["sync.phase"] * len(PHASES), "sync.replica", "sync.end"]
        assert [event.fields["phase"] for event in bench.events.named("sync.phase")] == list(PHASES)
        assert all(event.fields["version"] == 4 for event in bench.events.events)
        assert bench.events.named("sync.end")[0].fields["error"] is None


async def test_keep_keeps_the_cache() -> None:
    async with Bench([ThreadReplica("r0")], pause_mode="keep") as bench:
        await bench.manager.update_weights(1, deadline=after())
        assert bench.replicas[0].calls == ["pause:keep", "commit:True", "resume"]


class ForgetfulReplica(ThreadReplica):
    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset()


async def test_keep_is_refused_for_a_replica_that_cannot() -> None:
    with pytest.raises(ConfigError, match=r"replica r1 cannot keep sequences over a sync"):
        async with Bench([ThreadReplica("r0"), ForgetfulReplica("r1")], pause_mode="keep"):
            pass


async def test_unchanged_weights_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        first = await bench.manager.update_weights(1, deadline=after())
        with caplog.at_level(logging.WARNING):
            second = await bench.manager.update_weights(2, deadline=after())
            assert (second.changed, second.digest) == (False, first.digest)
            assert "version 2 has the same weights" in caplog.text
            caplog.clear()
            await bench.manager.update_weights(2, deadline=after())
            assert "same weights" not in caplog.text  # a version again, for a replica that missed it, is no surprise
        bench.sender.source.weights["embed"][7, 3] += 1
        third = await bench.manager.update_weights(3, deadline=after())
        assert third.changed
        assert third.digest != first.digest


@pytest.mark.parametrize("phase", ["prepare", "pause", "transfer", "commit", "resume"])
async def test_replica_that_fails_in_a_phase_is_invalid_until_the_next_sync(phase: str) -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1"), ThreadReplica("r2")]) as bench:
        await bench.manager.update_weights(1, deadline=after())
        bench.replicas[1].faults.raising.add(phase)
        begun = time.monotonic()
        report = await bench.manager.update_weights(2, deadline=after())
        assert time.monotonic() - begun < 4  # half the limit is when a stall would be noticed
        assert [sync.committed for sync in report.replicas] == [True, False, True]
        assert (report.replicas[1].phase, report.replicas[1].error) == (phase, f"RuntimeError: injected in {phase}")
        assert bench.manager.versions() == {"r0": 2, "r1": None, "r2": 2}
        assert not any(replica.paused for replica in bench.replicas)
        await bench.manager.update_weights(3, deadline=after())
        assert bench.manager.versions() == {"r0": 3, "r1": 3, "r2": 3}
        check_equal(bench.replicas[1].loaded, bench.sender.source.weights)


@pytest.mark.parametrize("phase", ["prepare", "pause", "transfer", "commit", "resume"])
async def test_replica_that_hangs_in_a_phase_costs_that_phase_its_limit_only(phase: str) -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1")], phase_limit_s=1.0) as bench:
        bench.replicas[1].faults.hanging.add(phase)
        begun = time.monotonic()
        report = await bench.manager.update_weights(1, deadline=after())
        assert time.monotonic() - begun < 6
        assert [sync.committed for sync in report.replicas] == [True, False]
        error = report.replicas[1].error
        assert error is not None
        assert phase in error
        assert "held by r1" in error
        await bench.manager.update_weights(2, deadline=after())
        assert bench.manager.versions() == {"r0": 2, "r1": 2}


async def test_engine_that_fails_at_tensor_3_is_named_with_the_tensor() -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1")]) as bench:
        bench.replicas[0].target = lambda: DictTarget(fail_at=3)
        report = await bench.manager.update_weights(1, deadline=after())
        assert "at tensor 'scalar': RuntimeError: engine refuses scalar" in str(report.replicas[0].error)
        assert bench.manager.versions() == {"r0": None, "r1": 1}


async def test_sync_raises_the_first_cause_when_too_few_committed() -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1")], min_healthy=2) as bench:
        bench.replicas[0].target = lambda: DictTarget(fail_at=3)
        with pytest.raises(WeightSyncError) as caught:
            await bench.manager.update_weights(1, deadline=after())
        error = caught.value
        assert (error.phase, error.tensor, error.missing) == ("transfer", "scalar", ("r0",))
        assert "1 of 2 replicas committed version 1, min_healthy is 2; first causes: r0: " in error.reason
        assert "engine refuses scalar" in error.reason
        # The other holds the verified weights all the same.
        assert bench.manager.versions() == {"r0": None, "r1": 1}
        assert bench.events.named("sync.end")[0].fields["error"] == str(error)


async def test_sync_with_one_replica_raises_quickly_when_that_fails() -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        bench.replicas[0].faults.raising.add("transfer")
        begun = time.monotonic()
        with pytest.raises(WeightSyncError, match="injected in transfer"):
            await bench.manager.update_weights(1, deadline=after())
        assert time.monotonic() - begun < 5
        await bench.manager.update_weights(1, deadline=after())
        assert bench.manager.versions() == {"r0": 1}


async def test_sender_that_fails_to_prepare_leaves_old_versions_valid() -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        await bench.manager.update_weights(1, deadline=after())
        bench.sender.faults.raising.add("prepare")
        with pytest.raises(WeightSyncError, match="sender failed: RuntimeError: injected in prepare"):
            await bench.manager.update_weights(2, deadline=after())
        assert bench.manager.versions() == {"r0": 1}
        assert bench.replicas[0].calls.count("pause:abort") == 1


@pytest.mark.parametrize("how", ["raising", "hanging", "cut"])
async def test_sender_that_fails_in_the_transfer_makes_all_invalid(how: str) -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1")], phase_limit_s=1.5) as bench:
        await bench.manager.update_weights(1, deadline=after())
        if how == "cut":
            bench.sender.source._stop_after = 4
        else:
            getattr(bench.sender.faults, how).add("transfer")
        with pytest.raises(WeightSyncError) as caught:
            await bench.manager.update_weights(2, deadline=after())
        assert caught.value.missing == ("r0", "r1")
        assert bench.manager.versions() == {"r0": None, "r1": None}
        bench.sender.source._stop_after = None
        await bench.manager.update_weights(3, deadline=after())
        assert bench.manager.versions() == {"r0": 3, "r1": 3}


async def test_replica_whose_digest_differs_is_never_committed() -> None:
    async with Bench([ThreadReplica("r0"), ThreadReplica("r1")]) as bench:
        bench.replicas[0].host.lie = "embed"
        report = await bench.manager.update_weights(1, deadline=after())
        assert report.replicas[0].phase == "verify"
        assert "not as sent: embed" in str(report.replicas[0].error)
        assert "commit:False" not in bench.replicas[0].calls
        assert bench.manager.versions() == {"r0": None, "r1": 1}


async def test_cancellation_resumes_and_cleans_up() -> None:
    release = threading.Event()
    async with Bench([ThreadReplica("r0")]) as bench:
        target = DictTarget(hold=(2, release))
        bench.replicas[0].target = lambda: target
        task = asyncio.ensure_future(bench.manager.update_weights(1, deadline=after()))
        await eventually(target.holding.is_set)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # a second one does not cut the cleaning up short
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bench.replicas[0].paused
        assert named() == []
        assert bench.manager.versions() == {"r0": None}
        assert bench.events.named("sync.end")[0].fields["error"] == "cancelled"
        bench.replicas[0].target = DictTarget
        await bench.manager.update_weights(1, deadline=after())
        assert bench.manager.versions() == {"r0": 1}


async def test_killed_replica_process_is_invalid_and_its_successor_joins() -> None:
    async with Bench([ProcessReplica("r0", die_at=3), ThreadReplica("r1")]) as bench:
        report = await bench.manager.update_weights(1, deadline=after())
        assert [sync.committed for sync in report.replicas] == [False, True]
        assert "killed by signal 9" in str(report.replicas[0].error)
        successor = ProcessReplica("r0")
        bench.replicas.append(successor)
        await bench.manager.add(successor)
        await bench.manager.update_weights(2, deadline=after())
        assert bench.manager.versions() == {"r0": 2, "r1": 2}


async def test_syncs_are_serialized() -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        await asyncio.gather(*(bench.manager.update_weights(version, deadline=after()) for version in (1, 2, 3)))
        ends = [event.fields["version"] for event in bench.events.events if event.name in ("sync.begin", "sync.end")]
        assert ends == [1, 1, 2, 2, 3, 3]
        assert len(set(bench.sender.sessions)) == 3


async def test_waiting_for_another_sync_is_bounded() -> None:
    async with Bench([ThreadReplica("r0")], phase_limit_s=2.0) as bench:
        bench.replicas[0].faults.hanging.add("pause")
        first = asyncio.ensure_future(bench.manager.update_weights(1, deadline=after()))
        await eventually(lambda: "pause:abort" in bench.replicas[0].calls)
        with pytest.raises(WaitTimeout, match="sync of version 2, held by the call before it"):
            await bench.manager.update_weights(2, deadline=after(0.2))
        with pytest.raises(WeightSyncError):
            await first


async def test_sleeping_replicas_are_invalid_and_left_out_until_they_wake(caplog: pytest.LogCaptureFixture) -> None:
    async with Bench([SleepyReplica("h0"), ThreadReplica("r0")]) as bench:
        await bench.manager.update_weights(1, deadline=after())
        await bench.manager.sleep(deadline=after())
        await bench.manager.sleep(deadline=after())
        assert bench.replicas[0].calls[-2:] == ["pause:abort", "sleep"]
        assert "sleep" not in bench.replicas[1].calls
        assert [text for text in caplog.messages if "cannot sleep" in text] == [
            f"{bench.replicas[1].replica_id} cannot sleep: it keeps its memory, and its weights"
        ]
        assert bench.manager.versions() == {"h0": None, "r0": 1}
        report = await bench.manager.update_weights(2, deadline=after())
        assert {sync.replica: sync.committed for sync in report.replicas} == {"h0": False, "r0": True}
        assert bench.manager.versions() == {"h0": None, "r0": 2}
        await bench.manager.wake(deadline=after())
        await bench.manager.wake(deadline=after())
        assert bench.manager.versions() == {"h0": None, "r0": 2}
        await bench.manager.update_weights(3, deadline=after())
        assert bench.manager.versions() == {"h0": 3, "r0": 3}


async def test_replica_that_cannot_sleep_is_named() -> None:
    async with Bench([SleepyReplica("h0"), SleepyReplica("h1")]) as bench:
        bench.replicas[1].faults.raising.add("sleep")
        with pytest.raises(StateError, match="1 of 2 replicas failed to sleep: h1: RuntimeError: injected in sleep"):
            await bench.manager.sleep(deadline=after())
        await bench.manager.wake(deadline=after())
        await bench.manager.update_weights(1, deadline=after())
        assert bench.manager.versions() == {"h0": 1, "h1": 1}


async def test_removed_replica_is_forgotten_and_an_added_one_takes_part() -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        await bench.manager.update_weights(1, deadline=after())
        late = ThreadReplica("r1")
        bench.replicas.append(late)
        await bench.manager.add(late)
        await bench.manager.add(late)
        assert bench.manager.versions() == {"r0": 1, "r1": None}
        await bench.manager.remove("r0")
        await bench.manager.remove("nobody")
        await bench.manager.update_weights(2, deadline=after())
        assert bench.manager.versions() == {"r1": 2}


async def test_no_replica_is_an_error() -> None:
    async with Bench([]) as bench:
        with pytest.raises(WeightSyncError, match="no replica"):
            await bench.manager.update_weights(1, deadline=after())


async def test_closed_manager_refuses_and_close_ends_a_running_sync() -> None:
    async with Bench([ThreadReplica("r0")]) as bench:
        release = threading.Event()
        target = DictTarget(hold=(2, release))
        bench.replicas[0].target = lambda: target
        running = asyncio.ensure_future(bench.manager.update_weights(1, deadline=after()))
        await eventually(target.holding.is_set)
        closing = asyncio.ensure_future(bench.manager.close(deadline=after(10)))
        await eventually(lambda: bench.sender.aborts == ["the checkpoint-engine manager was closed"])
        release.set()
        await closing
        with pytest.raises(WeightSyncError, match="manager was closed"):
            await running
        with pytest.raises(StateError, match="closed"):
            await bench.manager.update_weights(2, deadline=after())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"backend": "smh"}, PluginError, "shm"),
        ({"bucket_bytes": 0}, ConfigError, "bucket_bytes is 0"),
        ({"phase_limit_s": -1.0}, ConfigError, "phase_limit_s is -1.0"),
        ({"min_healthy": 0}, ConfigError, "min_healthy is 0"),
        ({"options": {"cleanup_limit": 3}}, ConfigError, "cleanup_limit_s"),
    ],
)
async def test_wrong_settings_are_refused_at_create(
    settings: dict[str, object], error: type[Exception], words: str
) -> None:
    bench = Bench([ThreadReplica("r0")], **settings)
    with pytest.raises(error, match=words):
        await bench.__aenter__()
