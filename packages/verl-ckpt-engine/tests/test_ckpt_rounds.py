"""A few replicas at a time: who pauses when, and what a failure costs the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ckpt_hosts import ThreadReplica
from ckpt_transport import check_equal
from test_ckpt_manager import Bench, after

from verl_contracts.errors import ConfigError, WeightSyncError
from verl_contracts.weights import PHASES

if TYPE_CHECKING:
    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import PauseMode


class Watched(ThreadReplica):
    """Counts how many pause at once, over all."""

    now: set[str]
    most: list[int]

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        self.now.add(self.replica_id)
        self.most.append(len(self.now))
        await super().pause(mode, deadline=deadline)

    async def resume(self, *, deadline: Deadline) -> None:
        await super().resume(deadline=deadline)
        self.now.discard(self.replica_id)


def replicas(count: int) -> list[Watched]:
    """Return replicas that share their counts."""
    found = [Watched(f"r{number}") for number in range(count)]
    for replica in found:
        replica.now, replica.most = found[0].__dict__.setdefault("now", set()), found[0].__dict__.setdefault("most", [])
    return found


@pytest.mark.parametrize(("size", "most", "sends"), [(None, 5, 1), (1, 1, 5), (2, 2, 3), (9, 5, 1)])
async def test_no_more_pause_at_once_than_may(size: int | None, most: int, sends: int) -> None:
    members = replicas(5)
    async with Bench(members, replicas_at_once=size) as bench:
        report = await bench.manager.update_weights(7, deadline=after())
        assert max(members[0].most) == most
        assert len(set(bench.sender.sessions)) == sends
        assert bench.manager.versions() == {f"r{number}": 7 for number in range(5)}
        assert [row.committed for row in report.replicas] == [True] * 5
        assert set(report.seconds) == set(PHASES)
        for replica in members:
            check_equal(replica.loaded, bench.sender.source.weights)


async def test_a_replica_that_fails_costs_its_round_and_no_other() -> None:
    members = replicas(3)
    async with Bench(members, replicas_at_once=1) as bench:
        await bench.manager.update_weights(1, deadline=after())
        members[1].faults.raising.add("transfer")
        report = await bench.manager.update_weights(2, deadline=after())
        assert [row.committed for row in report.replicas] == [True, False, True]
        assert bench.manager.versions() == {"r0": 2, "r1": None, "r2": 2}
        await bench.manager.update_weights(3, deadline=after())
        assert bench.manager.versions() == {"r0": 3, "r1": 3, "r2": 3}


@pytest.mark.parametrize("phase", ["prepare", "transfer"])
async def test_a_sender_that_fails_leaves_those_whose_turn_did_not_come_as_they_were(phase: str) -> None:
    members = replicas(3)
    async with Bench(members, replicas_at_once=1) as bench:
        await bench.manager.update_weights(1, deadline=after())
        bench.sender.faults.raising.add(phase)
        with pytest.raises(WeightSyncError, match=f"0 of 3 replicas committed version 2, .*injected in {phase}"):
            await bench.manager.update_weights(2, deadline=after())
        lost = None if phase == "transfer" else 1
        assert bench.manager.versions() == {"r0": lost, "r1": 1, "r2": 1}
        ended = bench.events.named("sync.replica")[-3:]
        assert [event.fields["committed"] for event in ended] == [False] * 3
        assert "not begun, for the sender failed before" in str(ended[2].fields["error"])
        await bench.manager.update_weights(3, deadline=after())
        assert set(bench.manager.versions().values()) == {3}


async def test_too_few_in_all_rounds_together_is_an_error() -> None:
    members = replicas(3)
    async with Bench(members, replicas_at_once=1, min_healthy=2) as bench:
        members[0].faults.raising.add("commit")
        await bench.manager.update_weights(1, deadline=after())
        members[0].faults.raising.add("commit")
        members[2].faults.raising.add("pause")
        with pytest.raises(WeightSyncError, match=r"1 of 3 replicas committed version 2, .* 2; .* r0: .*r2"):
            await bench.manager.update_weights(2, deadline=after())
        assert bench.manager.versions() == {"r0": None, "r1": 2, "r2": None}


class Fickle(ThreadReplica):
    """Its resume lets the trainer change the weights, which it must not while a version is going round."""

    bench: Bench

    async def resume(self, *, deadline: Deadline) -> None:
        await super().resume(deadline=deadline)
        self.bench.sender.source.weights["embed"][7, 3] += 1


async def test_weights_that_change_between_rounds_are_not_called_one_version() -> None:
    first, second = Fickle("r0"), ThreadReplica("r1")
    async with Bench([first, second], replicas_at_once=1) as bench:
        first.bench = bench
        report = await bench.manager.update_weights(1, deadline=after())
        assert [row.committed for row in report.replicas] == [True, False]
        assert "changed between its rounds" in str(report.replicas[1].error)
        assert bench.manager.versions() == {"r0": 1, "r1": None}


async def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="replicas_at_once is 0; it must be more than 0"):
        async with Bench([ThreadReplica("r0")], replicas_at_once=0):
            pass
