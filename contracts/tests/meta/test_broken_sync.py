"""A checkpoint manager that meets its contract, and what the suite says when one rule is broken."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from typing import TYPE_CHECKING, TypeVar, cast

import pytest
from broken import Broken, name_of, reject

from verl_contracts.errors import WeightSyncError
from verl_contracts.testing.memory import MemoryPlanner
from verl_contracts.testing.suites.checkpoint import CheckpointEngineManagerSuite
from verl_contracts.waits import bounded
from verl_contracts.weights import ReplicaSync, SyncReport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import Replica
    from verl_contracts.testing.scripted import ScriptedReplica
    from verl_contracts.weights import CheckpointEngineManager, CheckpointSettings, TransferReport, WeightSenderHost

T = TypeVar("T")


class Manager:
    """One phase after the other. `Config` and `create` belong to the plug-in, not to what the suite tests."""

    def __init__(
        self, settings: CheckpointSettings, *, sender: WeightSenderHost, replicas: Sequence[Replica], clock: Clock
    ) -> None:
        self.settings, self.sender, self.clock = settings, sender, clock
        self.held: dict[str, Replica] = {replica.replica_id: replica for replica in replicas}
        self.version: dict[str, int | None] = dict.fromkeys(self.held)
        self.sessions = itertools.count()
        self.digest = ""

    async def within(self, awaitable: Awaitable[T], deadline: Deadline) -> T:
        limit = deadline.within(self.clock, self.settings.phase_limit_s)
        return await bounded(awaitable, subject="phase", holder="peers", deadline=limit, clock=self.clock)

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        try:
            return await self.sync(version, deadline)
        finally:
            await self.restore(deadline)

    async def sync(self, version: int, deadline: Deadline) -> SyncReport:
        session = f"s{next(self.sessions)}"
        manifest, senders = await self.sender.prepare(version, session=session, deadline=deadline)
        for replica in self.held.values():
            await replica.pause(self.settings.pause_mode, deadline=deadline)
        sent: asyncio.Task[Sequence[TransferReport]] | None = None
        rows: list[ReplicaSync] = []
        try:
            for name, replica in self.held.items():
                try:
                    host = replica.receiver_host
                    receivers = await host.prepare(manifest, session=session, deadline=deadline)
                    plan = MemoryPlanner().plan(
                        manifest, session=session, senders=senders, receivers=receivers, bucket_bytes=1024
                    )
                    sent = sent or asyncio.create_task(self.sender.transfer(plan, deadline=deadline))
                    self.version[name] = None
                    (got,) = await self.within(host.transfer(plan, deadline=deadline), deadline)
                    (given,) = await self.within(asyncio.shield(sent), deadline)
                    if got.digests != given.digests:
                        raise WeightSyncError("verify", "digests differ")
                    await host.commit(version, keep_cache=False, deadline=deadline)
                except Exception as exc:
                    if sent is not None and sent.done() and sent.exception() is not None:
                        raise
                    rows.append(ReplicaSync(replica=name, committed=False, phase="transfer", error=str(exc)))
                    await self.invalidate(replica)
                else:
                    self.version[name] = version
                    rows.append(ReplicaSync(replica=name, committed=True, phase="resume"))
        finally:
            if sent is not None:
                sent.cancel()
                await asyncio.gather(sent, return_exceptions=True)
        if sum(row.committed for row in rows) < self.settings.min_healthy:
            raise WeightSyncError("commit", "; ".join(str(row.error) for row in rows))
        digest = hashlib.sha256(str(version).encode()).hexdigest()
        changed, self.digest = digest != self.digest, digest
        return SyncReport(
            version=version,
            replicas=tuple(rows),
            num_bytes=manifest.num_bytes,
            seconds={},
            digest=digest,
            changed=changed,
        )

    async def invalidate(self, replica: Replica) -> None:
        cast("ScriptedReplica", replica).invalidate()
        self.version[replica.replica_id] = None

    async def restore(self, deadline: Deadline) -> None:
        for replica in self.held.values():
            await replica.resume(deadline=deadline)

    def versions(self) -> Mapping[str, int | None]:
        return dict(self.version)

    async def sleep(self, *, deadline: Deadline) -> None:
        for name, replica in self.held.items():
            await replica.pause("abort", deadline=deadline)
            await cast("ScriptedReplica", replica).sleep(deadline=deadline)
            self.version[name] = None

    async def wake(self, *, deadline: Deadline) -> None:
        for replica in self.held.values():
            await cast("ScriptedReplica", replica).wake(deadline=deadline)

    async def add(self, replica: Replica, /) -> None:
        self.held.setdefault(replica.replica_id, replica)
        self.version.setdefault(replica.replica_id, None)

    async def remove(self, replica_id: str, /) -> None:
        self.held.pop(replica_id, None)
        self.version.pop(replica_id, None)

    async def close(self, *, deadline: Deadline) -> None:
        await self.sender.close(deadline=deadline)


class ManagerSubject(CheckpointEngineManagerSuite):
    kind = Manager

    async def create(
        self, settings: CheckpointSettings, *, sender: WeightSenderHost, replicas: Sequence[Replica], clock: Clock
    ) -> CheckpointEngineManager:
        made = self.kind(settings, sender=sender, replicas=replicas, clock=clock)
        return cast("CheckpointEngineManager", made)


class TestManager(ManagerSubject):
    pass


class LeavesThemPaused(Manager):
    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        report = await self.sync(version, deadline)
        await self.restore(deadline)
        return report


class ServesMixedWeights(Manager):
    async def invalidate(self, replica: Replica) -> None:
        """Keeps it as if nothing had happened."""
        scripted = cast("ScriptedReplica", replica)
        scripted.commit(2, keep_cache=True)


class MapIsWishful(Manager):
    def versions(self) -> Mapping[str, int | None]:
        newest = max((version for version in self.version.values() if version is not None), default=None)
        return dict.fromkeys(self.version, newest)


class NoLimitPerPhase(Manager):
    async def within(self, awaitable: Awaitable[T], deadline: Deadline) -> T:
        return await awaitable


class AnyIsEnough(Manager):
    def __init__(
        self, settings: CheckpointSettings, *, sender: WeightSenderHost, replicas: Sequence[Replica], clock: Clock
    ) -> None:
        super().__init__(settings, sender=sender, replicas=replicas, clock=clock)
        object.__setattr__(settings, "min_healthy", 0)


class NeverChanges(Manager):
    async def sync(self, version: int, deadline: Deadline) -> SyncReport:
        self.digest = hashlib.sha256(str(version).encode()).hexdigest()
        return await super().sync(version, deadline)


FAILS = "test_replica_that_fails_is_invalid_and_takes_part_again"
SENDER = "test_sender_that_fails_leaves_nobody_paused_and_the_next_sync_works"

BROKEN = [
    Broken(kind=LeavesThemPaused, test=SENDER, says="never paused", parameters={"phase": "transfer"}),
    Broken(kind=LeavesThemPaused, test="test_cancelled_sync_leaves_nobody_paused", says="AssertionError"),
    Broken(kind=ServesMixedWeights, test=FAILS, says="AssertionError", parameters={"phase": "transfer"}),
    Broken(kind=MapIsWishful, test=FAILS, says="AssertionError", parameters={"phase": "commit"}),
    Broken(
        kind=NoLimitPerPhase, test="test_transfer_that_stalls_ends_at_the_limit_of_its_phase", says="AssertionError"
    ),
    Broken(kind=AnyIsEnough, test="test_too_few_healthy_replicas_raise_with_the_cause", says="DID NOT RAISE"),
    Broken(kind=NeverChanges, test="test_digest_is_that_of_the_weights", says="AssertionError"),
]


@pytest.mark.parametrize("row", BROKEN, ids=name_of)
def test_broken_manager_is_rejected(row: Broken) -> None:
    reject(ManagerSubject, row)
