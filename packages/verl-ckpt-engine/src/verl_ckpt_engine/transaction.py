"""One weight sync, from `prepare` to `resume`.

Owns the order of the phases, what each replica got to, and the way back: whatever happens, cancellation included, no
replica stays paused and nothing that was prepared stays behind. It never touches weights and knows no backend; those
are behind the hosts. A failure half-way used to leave replicas paused for ever, or serving half of a version.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from verl_ckpt_engine.comparing import check_received, check_sent
from verl_ckpt_engine.digest import combined_digest
from verl_contracts.clock import Deadline
from verl_contracts.errors import VerlError, WeightSyncError
from verl_contracts.waits import bounded
from verl_contracts.weights import ReplicaSync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import Replica
    from verl_contracts.weights import (
        CheckpointSettings,
        EndpointInfo,
        Manifest,
        Plan,
        TopologyPlanner,
        TransferReport,
        WeightSenderHost,
    )

T = TypeVar("T")

__all__ = ["SENDER", "Member", "Outcome", "Transaction", "describe", "despite_cancellation", "failure"]

_log = logging.getLogger(__name__)

_PHASE_LIMIT = "actor_rollout_ref.rollout.checkpoint_engine.phase_limit_s"
SENDER = "sender"
"""Who failed, when it is none of the replicas."""
_OWN_SHARE = 0.9
"""Share of a phase's limit that hosts are given, so that their error, which knows the tensor, comes before ours."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One replica in one sync."""

    replica: Replica
    phase: str = "prepare"
    """Last phase that it entered."""
    error: str | None = None
    prepared: bool = False
    paused: bool = False
    """Whether a pause was asked for and not taken back."""
    transferring: bool = False
    committed: bool = False
    endpoints: Sequence[EndpointInfo] = ()
    reports: Sequence[TransferReport] = ()

    @property
    def name(self) -> str:
        """The replica's id."""
        return self.replica.replica_id

    def result(self) -> ReplicaSync:
        """Return how it went."""
        first = self.reports[0] if self.reports else None
        return ReplicaSync(
            replica=self.name,
            committed=self.committed,
            phase=self.phase,
            error=self.error,
            tensors=first.tensors if first is not None else 0,
            num_bytes=first.num_bytes if first is not None else 0,
            skipped=tuple(first.skipped) if first is not None else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a transaction that sent everything has to tell."""

    num_bytes: int
    digest: str


@dataclass(slots=True, kw_only=True)
class Transaction:
    """One sync. `run` once."""

    version: int
    settings: CheckpointSettings
    cleanup_limit_s: float
    planner: TopologyPlanner
    sender: WeightSenderHost
    members: list[Member]
    clock: Clock
    events: EventSink
    deadline: Deadline
    set_version: Callable[[Replica, int | None], None]
    """Told whenever a replica's committed version changes."""
    expected: str | None = None
    """Digest that the weights must have, because others were brought to the same version before."""
    seconds: dict[str, float] = field(default_factory=dict)
    phase: str = "prepare"
    session: str = ""
    causes: list[tuple[str, Exception]] = field(default_factory=list)
    """Who failed, and how, in order."""
    sender_error: Exception | None = None
    _sender_prepared: bool = False
    _sending: bool = False
    _plan: Plan | None = None
    _senders: Sequence[EndpointInfo] = ()
    _sent: Sequence[TransferReport] = ()

    async def run(self) -> Outcome:
        """Go through all phases. Raises `WeightSyncError` when fewer than `min_healthy` replicas committed."""
        self.session = f"{self.version}-{uuid.uuid4().hex[:12]}"
        reason = "the sync was cancelled"
        try:
            outcome = await self._run()
            reason = "the sync is over"
        except Exception as exc:
            reason = describe(exc)
            raise
        finally:
            await despite_cancellation(self._restore(reason), self.cleanup_limit_s)
        return outcome

    async def _run(self) -> Outcome:
        with self._phase("prepare") as limit:
            manifest = await self._prepare(limit)
        with self._phase("plan"):
            self._plan_for_healthy(manifest)
        with self._phase("pause") as limit:
            await self._each(self._pause, limit)
        with self._phase("connect"):
            self._plan_for_healthy(manifest)
        with self._phase("transfer") as limit:
            await self._transfer(limit)
        with self._phase("verify"):
            digests = self._verify(manifest)
        with self._phase("commit") as limit:
            await self._each(self._commit, limit)
        with self._phase("resume") as limit:
            await self._each(self._resume, limit)
        with self._phase("close"):  # last, for generation need not wait for it
            await asyncio.gather(self._close_sender(), *(self._close_receiver(member) for member in self.healthy))
        committed = [member for member in self.members if member.committed]
        if len(committed) < self.settings.min_healthy:
            raise failure(self.members, [self], self.settings)
        return Outcome(num_bytes=manifest.num_bytes, digest=combined_digest(manifest, digests))

    @property
    def healthy(self) -> list[Member]:
        """Members without an error."""
        return [member for member in self.members if member.error is None]

    @contextmanager
    def _phase(self, name: str) -> Iterator[Deadline]:
        """Enter a phase; stop here when nobody is left for it, or the sender is lost."""
        if self.sender_error is not None:
            for member in self.healthy:
                self._lose(member, self.sender_error)
        if not self.healthy and name not in ("prepare", "resume", "close"):
            raise failure(self.members, [self], self.settings)
        self.phase = name
        for member in self.healthy:
            member.phase = name
        begun = self.clock.now()
        try:
            yield self.deadline.within(self.clock, self.settings.phase_limit_s, setting=_PHASE_LIMIT)
        finally:
            self.seconds[name] = self.clock.now() - begun
            self.events.emit("sync.phase", {"version": self.version, "phase": name, "seconds": self.seconds[name]})

    async def _prepare(self, limit: Deadline) -> Manifest:
        self._sender_prepared = True
        try:
            manifest, self._senders = await self._bounded(
                self.sender.prepare(self.version, session=self.session, deadline=self._own(limit)), "sender", limit
            )
        except Exception as exc:
            self.sender_error = WeightSyncError("prepare", f"the sender failed: {describe(exc)}", missing=("sender",))
            self.causes.append((SENDER, self.sender_error))
            raise self.sender_error from exc

        async def prepare(member: Member, own: Deadline) -> None:
            member.prepared = True
            host = member.replica.receiver_host
            member.endpoints = await host.prepare(manifest, session=self.session, deadline=own)

        await self._each(prepare, limit)
        return manifest

    def _plan_for_healthy(self, manifest: Manifest) -> None:
        """Plan for those who are still in: a sender that waits for a replica that will not come waits in vain."""
        plan = self.planner.plan(
            manifest,
            session=self.session,
            senders=self._senders,
            receivers=[endpoint for member in self.healthy for endpoint in member.endpoints],
            bucket_bytes=self.settings.bucket_bytes,
        )
        self._plan = replace(plan, verification=self.settings.verification)

    async def _pause(self, member: Member, own: Deadline) -> None:
        member.paused = True
        await member.replica.pause(self.settings.pause_mode, deadline=own)

    async def _transfer(self, limit: Deadline) -> None:
        """Send and receive at once. One lost replica is told to stop; a lost sender, or the last replica, ends it."""
        plan = self._plan
        if plan is None:
            raise WeightSyncError("transfer", "there is no plan")
        self._sending = True
        members = self.healthy

        async def send() -> None:
            try:
                self._sent = await self._bounded(self.sender.transfer(plan, deadline=self._own(limit)), "sender", limit)
            except Exception as exc:
                self.sender_error = exc
                self.causes.append((SENDER, exc))
                reason = f"the sender failed: {describe(exc)}"
                await asyncio.gather(*(self._abort(member, reason) for member in members if not member.reports))

        async def receive(member: Member) -> None:
            try:
                host = member.replica.receiver_host
                member.reports = await self._bounded(host.transfer(plan, deadline=self._own(limit)), member.name, limit)
            except Exception as exc:
                self._lose(member, exc)
                await self._abort(member, describe(exc))
                if not any(other.error is None for other in members) and self.sender_error is None:
                    await self._abort_sender(f"every replica failed; {member.name}: {describe(exc)}")

        for member in members:
            member.transferring = True
            self.set_version(member.replica, None)
        await asyncio.gather(send(), *(receive(member) for member in members))

    def _verify(self, manifest: Manifest) -> Mapping[str, int]:
        """Compare what arrived with what was sent, and both with the manifest. Returns the sender's digests."""
        try:
            digests = check_sent(manifest, self._sent)
            if self.expected not in (None, combined_digest(manifest, digests)):
                raise WeightSyncError("verify", f"the weights of version {self.version} changed between its rounds")
        except WeightSyncError as exc:
            self.sender_error = exc
            self.causes.append((SENDER, exc))
            return {}
        for member in self.healthy:
            try:
                check_received(manifest, digests, member.reports, ranks=len(member.endpoints))
            except WeightSyncError as exc:
                self._lose(member, exc)
        return digests

    async def _commit(self, member: Member, own: Deadline) -> None:
        keep = self.settings.pause_mode == "keep"
        await member.replica.receiver_host.commit(self.version, keep_cache=keep, deadline=own)
        member.committed = True
        self.set_version(member.replica, self.version)

    async def _resume(self, member: Member, own: Deadline) -> None:
        await member.replica.resume(deadline=own)
        member.paused = False

    async def _each(self, act: Callable[[Member, Deadline], Awaitable[None]], limit: Deadline) -> None:
        """Do `act` with all healthy members at once; those for whom it fails are out."""

        async def one(member: Member) -> None:
            try:
                await self._bounded(act(member, self._own(limit)), member.name, limit)
            except Exception as exc:
                self._lose(member, exc)

        await asyncio.gather(*(one(member) for member in self.healthy))

    async def _restore(self, reason: str) -> None:
        """Take everything back that was not taken back yet. Never raises; what cannot be restored is logged."""

        async def restore(member: Member) -> None:
            if member.transferring and not member.reports:
                await self._abort(member, reason)
            if member.paused:
                await self._tidy(lambda deadline: member.replica.resume(deadline=deadline), member.name)
            await self._close_receiver(member)

        async def restore_sender() -> None:
            if self._sending and not self._sent:
                await self._abort_sender(reason)
            await self._close_sender()

        await asyncio.gather(restore_sender(), *(restore(member) for member in self.members))

    async def _close_receiver(self, member: Member) -> None:
        if member.prepared:
            member.prepared = False
            await self._tidy(lambda deadline: member.replica.receiver_host.close(deadline=deadline), member.name)

    async def _close_sender(self) -> None:
        if self._sender_prepared:
            self._sender_prepared = False
            await self._tidy(lambda deadline: self.sender.close(deadline=deadline), "sender")

    async def _abort(self, member: Member, reason: str) -> None:
        host = member.replica.receiver_host
        await self._tidy(lambda deadline: host.abort(reason, deadline=deadline), member.name)

    async def _abort_sender(self, reason: str) -> None:
        await self._tidy(lambda deadline: self.sender.abort(reason, deadline=deadline), "sender")

    async def _tidy(self, act: Callable[[Deadline], Awaitable[None]], who: str) -> None:
        """Do one step of cleaning up, within its own limit; a failure is logged, for the cause is known already."""
        limit = Deadline.after(self.clock, self.cleanup_limit_s)
        try:
            await self._bounded(act(self._own(limit)), who, limit)
        except Exception as exc:
            _log.warning("cleaning up the sync of version %d: %s: %s", self.version, who, describe(exc))

    def _lose(self, member: Member, exc: Exception) -> None:
        member.error = describe(exc)
        member.committed = False
        self.set_version(member.replica, None)
        self.causes.append((member.name, exc))
        _log.warning("replica %s is invalid: it failed in phase %s: %s", member.name, self.phase, member.error)

    def _own(self, limit: Deadline) -> Deadline:
        return Deadline.after(self.clock, limit.remaining(self.clock) * _OWN_SHARE)

    def _bounded(self, awaitable: Awaitable[T], who: str, limit: Deadline) -> Coroutine[None, None, T]:
        subject = f"{self.phase} of weights version {self.version}"
        return bounded(awaitable, subject=subject, holder=who, deadline=limit, clock=self.clock)


def describe(exc: BaseException) -> str:
    """Return `exc` in one line; errors of our own say what they are themselves."""
    return str(exc) if isinstance(exc, VerlError) else f"{type(exc).__name__}: {exc}"


def failure(
    members: Sequence[Member], transactions: Sequence[Transaction], settings: CheckpointSettings
) -> WeightSyncError:
    """Return the error of a whole sync, which may have taken several transactions, first cause first."""
    last, causes = transactions[-1], [cause for transaction in transactions for cause in transaction.causes]
    missing = [member.name for member in members if not member.committed]
    distinct = {id(exc): f"{who}: {describe(exc)}" for who, exc in reversed(causes)}
    listed = "; ".join(list(reversed(distinct.values()))[:5])
    first = causes[0][1] if causes else None
    known = first if isinstance(first, WeightSyncError) else None
    error = WeightSyncError(
        known.phase if known is not None else last.phase,
        f"{len(members) - len(missing)} of {len(members)} replicas committed version {last.version}, "
        f"min_healthy is {settings.min_healthy}; first causes: {listed}",
        known.tensor if known is not None else None,
        missing,
    )
    error.__cause__ = first
    return error


async def despite_cancellation(work: Coroutine[None, None, None], limit_s: float) -> None:
    """Finish `work`, which bounds itself, before a cancellation gets through."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,), timeout=limit_s)
        except asyncio.CancelledError as exc:
            cancelled = exc
    task.result()
    if cancelled is not None:
        raise cancelled
