# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of a `CheckpointEngineManager`: a sync is a transaction, whatever fails in it.

Replicas, sender and receivers are scripted, so that every phase can be made to fail, in virtual time.
"""

from __future__ import annotations

import abc
import asyncio
from typing import TYPE_CHECKING

import pytest

from verl_contracts.clock import Deadline
from verl_contracts.errors import WeightSyncError
from verl_contracts.rollout import INVALID, SERVING
from verl_contracts.testing.scripted import ScriptedReplica
from verl_contracts.testing.scripted_hosts import ScriptedSenderHost
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.weights import CheckpointSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Replica, ReplicaState
    from verl_contracts.weights import CheckpointEngineManager, WeightSenderHost

__all__ = ["CheckpointEngineManagerSuite"]

_BACKEND = "verl_contracts.testing.memory:MemoryBackend"


class CheckpointEngineManagerSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `create`."""

    virtual = True

    @abc.abstractmethod
    def create(
        self, settings: CheckpointSettings, *, sender: WeightSenderHost, replicas: Sequence[Replica], clock: Clock
    ) -> Awaitable[CheckpointEngineManager]:
        """Create a manager."""

    async def _made(
        self, clock: Clock, count: int = 2, *, min_healthy: int = 1
    ) -> tuple[CheckpointEngineManager, ScriptedSenderHost, list[ScriptedReplica]]:
        sender = ScriptedSenderHost(clock)
        replicas = [ScriptedReplica(f"r{number}", clock=clock) for number in range(count)]
        settings = CheckpointSettings(backend=_BACKEND, phase_limit_s=20.0, min_healthy=min_healthy)
        return await self.create(settings, sender=sender, replicas=replicas, clock=clock), sender, replicas

    def _soon(self, clock: Clock) -> Deadline:
        return Deadline.after(clock, 200.0)

    async def _states(self, replicas: Sequence[Replica], clock: Clock) -> list[tuple[ReplicaState, int | None]]:
        found = [await replica.status(deadline=self._soon(clock)) for replica in replicas]
        return [(status.state, status.version) for status in found]

    def test_every_replica_serves_the_new_version(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, replicas = await self._made(clock)
            assert dict(manager.versions()) == {"r0": None, "r1": None}
            for version in (0, 1, 7):
                report = await manager.update_weights(version, deadline=self._soon(clock))
                assert report.version == version
                assert {(row.replica, row.committed) for row in report.replicas} == {("r0", True), ("r1", True)}
                assert report.changed
                assert report.num_bytes == 48
                assert dict(manager.versions()) == {"r0": version, "r1": version}
                assert await self._states(replicas, clock) == [(SERVING, version)] * 2

        self.run(case)

    def test_digest_is_that_of_the_weights(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, _ = await self._made(clock)
            first, again, other = [
                await manager.update_weights(version, deadline=self._soon(clock)) for version in (3, 3, 4)
            ]
            assert first.digest == again.digest != other.digest
            assert (again.changed, other.changed) == (False, True)

        self.run(case)

    @pytest.mark.parametrize("phase", ["prepare", "transfer", "commit"])
    def test_replica_that_fails_is_invalid_and_takes_part_again(self, phase: str) -> None:
        async def case(clock: Clock) -> None:
            manager, _, replicas = await self._made(clock)
            await manager.update_weights(1, deadline=self._soon(clock))
            replicas[1].receiver_host.faults[phase] = OSError("scripted fault")
            report = await manager.update_weights(2, deadline=self._soon(clock))
            rows = {row.replica: row for row in report.replicas}
            assert (rows["r0"].committed, rows["r1"].committed) == (True, False)
            assert "scripted fault" in (rows["r1"].error or "")
            assert dict(manager.versions()) == {"r0": 2, "r1": None}
            (good, bad) = await self._states(replicas, clock)
            assert good == (SERVING, 2)
            assert bad != (SERVING, 2)
            replicas[1].receiver_host.faults.clear()
            await manager.update_weights(3, deadline=self._soon(clock))
            assert await self._states(replicas, clock) == [(SERVING, 3)] * 2

        self.run(case)

    def test_too_few_healthy_replicas_raise_with_the_cause(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, replicas = await self._made(clock, min_healthy=2)
            replicas[0].receiver_host.faults["transfer"] = OSError("scripted fault")
            with pytest.raises(WeightSyncError, match="scripted fault"):
                await manager.update_weights(1, deadline=self._soon(clock))
            assert manager.versions()["r0"] is None
            replicas[0].receiver_host.faults.clear()
            await manager.update_weights(2, deadline=self._soon(clock))
            assert await self._states(replicas, clock) == [(SERVING, 2)] * 2

        self.run(case)

    @pytest.mark.parametrize("phase", ["prepare", "transfer"])
    def test_sender_that_fails_leaves_nobody_paused_and_the_next_sync_works(self, phase: str) -> None:
        async def case(clock: Clock) -> None:
            manager, sender, replicas = await self._made(clock)
            await manager.update_weights(1, deadline=self._soon(clock))
            sender.faults[phase] = OSError("scripted fault")
            with pytest.raises(Exception, match="scripted fault"):
                await manager.update_weights(2, deadline=self._soon(clock))
            for state, version in await self._states(replicas, clock):
                assert (state, version) in ((SERVING, 1), (INVALID, None)), "old weights, or none; never paused"
            assert dict(manager.versions()) == {
                replica.replica_id: version
                for replica, (_, version) in zip(replicas, await self._states(replicas, clock), strict=True)
            }
            sender.faults.clear()
            await manager.update_weights(3, deadline=self._soon(clock))
            assert await self._states(replicas, clock) == [(SERVING, 3)] * 2

        self.run(case)

    def test_transfer_that_stalls_ends_at_the_limit_of_its_phase(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, replicas = await self._made(clock)
            replicas[0].receiver_host.seconds = 10_000.0
            began = clock.now()
            report = await manager.update_weights(1, deadline=self._soon(clock))
            assert clock.now() - began < 100.0
            assert {row.replica: row.committed for row in report.replicas} == {"r0": False, "r1": True}

        self.run(case)

    def test_cancelled_sync_leaves_nobody_paused(self) -> None:
        async def case(clock: Clock) -> None:
            manager, sender, replicas = await self._made(clock)
            await manager.update_weights(1, deadline=self._soon(clock))
            sender.seconds = 5.0
            sync = asyncio.create_task(manager.update_weights(2, deadline=self._soon(clock)))
            await clock.sleep(1.0)
            sync.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sync
            for state, version in await self._states(replicas, clock):
                assert (state, version) in ((SERVING, 1), (INVALID, None))
            sender.seconds = 0.0
            await manager.update_weights(3, deadline=self._soon(clock))
            assert await self._states(replicas, clock) == [(SERVING, 3)] * 2

        self.run(case)

    def test_replicas_come_and_go(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, replicas = await self._made(clock)
            late = ScriptedReplica("late", clock=clock)
            for _ in range(2):
                await manager.add(late)
                await manager.remove("r0")
            await manager.remove("unknown")
            report = await manager.update_weights(4, deadline=self._soon(clock))
            assert {row.replica for row in report.replicas} == {"r1", "late"}
            assert dict(manager.versions()) == {"r1": 4, "late": 4}
            assert (await self._states([replicas[0]], clock))[0][1] is None

        self.run(case)

    def test_sleeping_replicas_are_invalid_until_the_next_sync(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, replicas = await self._made(clock)
            await manager.update_weights(1, deadline=self._soon(clock))
            for _ in range(2):
                await manager.sleep(deadline=self._soon(clock))
            assert dict(manager.versions()) == {"r0": None, "r1": None}
            for _ in range(2):
                await manager.wake(deadline=self._soon(clock))
            await manager.update_weights(2, deadline=self._soon(clock))
            assert await self._states(replicas, clock) == [(SERVING, 2)] * 2

        self.run(case)

    def test_close_may_be_repeated(self) -> None:
        async def case(clock: Clock) -> None:
            manager, _, _ = await self._made(clock)
            await manager.update_weights(1, deadline=self._soon(clock))
            for _ in range(2):
                await manager.close(deadline=self._soon(clock))

        self.run(case)
