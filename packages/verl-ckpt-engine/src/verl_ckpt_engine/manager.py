"""Keeps replicas at a verified version of the weights.

Owns which replicas take part, which version each has committed, and that one sync runs at a time. How a sync goes is
`transaction`'s business. The map of versions is never optimistic: a replica counts as invalid from the moment its
transfer begins until its commit has returned, and after any failure.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, cast

from verl_ckpt_engine.rounds import Rounds
from verl_ckpt_engine.transaction import Member, describe, despite_cancellation
from verl_contracts.errors import ConfigError, StateError, WeightSyncError
from verl_contracts.plugins import build_config, families, load_plugin
from verl_contracts.rollout import KEEP, SLEEP
from verl_contracts.waits import bounded
from verl_contracts.weights import ReplicaSync, SyncReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink, JsonValue
    from verl_contracts.rollout import PauseMode, Replica, SupportsSleep
    from verl_contracts.weights import CheckpointEngineManager, CheckpointSettings, TopologyPlanner, WeightSenderHost

__all__ = ["TransactionalConfig", "TransactionalManager"]

_log = logging.getLogger(__name__)

_KEY = "actor_rollout_ref.rollout.checkpoint_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionalConfig:
    """Options of `TransactionalManager`."""

    cleanup_limit_s: float = 10.0
    """Longest that one step of cleaning up may take, per replica, after a sync that failed too."""


class TransactionalManager:
    """The default `CheckpointEngineManager`: each sync is a transaction per replica."""

    Config: ClassVar[type] = TransactionalConfig

    def __init__(
        self,
        settings: CheckpointSettings,
        config: TransactionalConfig,
        *,
        planner: TopologyPlanner,
        sender: WeightSenderHost,
        clock: Clock,
        events: EventSink,
    ) -> None:
        """Use `create`."""
        self._settings = settings
        self._config = config
        self._planner = planner
        self._sender = sender
        self._clock = clock
        self._events = events
        self._replicas: dict[str, Replica] = {}
        self._versions: dict[str, int | None] = {}
        self._asleep: set[str] = set()
        self._sleepless: set[str] = set()
        """Those of which it was said that they cannot sleep."""
        self._last: tuple[int, str] | None = None
        self._lock = asyncio.Lock()
        self._current: Rounds | None = None
        self._closed = False

    @classmethod
    async def create(
        cls,
        settings: CheckpointSettings,
        /,
        *,
        sender: WeightSenderHost,
        replicas: Sequence[Replica],
        clock: Clock,
        events: EventSink,
    ) -> Self:
        """Check the settings and load the backend's planner; move nothing yet."""
        for name, value in (
            ("bucket_bytes", settings.bucket_bytes),
            ("phase_limit_s", settings.phase_limit_s),
            ("min_healthy", settings.min_healthy),
            ("replicas_at_once", settings.replicas_at_once),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"{_KEY}: {name} is {value}; it must be more than 0")
        backend = load_plugin(families.WEIGHT_BACKEND, settings.backend, key=f"{_KEY}.backend")
        config = build_config(TransactionalConfig, settings.options, key=f"{_KEY}.engine_kwargs")
        manager = cls(settings, config, planner=backend.planner_class(), sender=sender, clock=clock, events=events)
        for replica in replicas:
            await manager.add(replica)
        return manager

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        """Bring every replica that is awake to `version`.

        A replica that sleeps cannot be written to: it is left out, and reported as such. Raises `WeightSyncError` when
        fewer than `min_healthy` replicas committed, `ConfigError` when the backend cannot connect sender and replicas.
        """
        async with self._exclusive(f"the sync of version {version}", deadline):
            asleep = tuple(
                ReplicaSync(replica=name, committed=False, phase="prepare", error="asleep; wake it before the sync")
                for name in self._replicas
                if name in self._asleep
            )
            members = [Member(replica=replica) for name, replica in self._replicas.items() if name not in self._asleep]
            rounds = Rounds(
                version=version,
                settings=self._settings,
                cleanup_limit_s=self._config.cleanup_limit_s,
                planner=self._planner,
                sender=self._sender,
                members=members,
                clock=self._clock,
                events=self._events,
                deadline=deadline,
                set_version=self._set_version,
            )
            self._emit("sync.begin", version=version, replicas=[member.name for member in members])
            begun = self._clock.now()
            error: str | None = "cancelled"
            report: SyncReport | None = None
            self._current = rounds
            try:
                if not members:
                    raise WeightSyncError("prepare", f"there is no replica that is awake; asleep: {len(asleep)}")
                outcome = await rounds.run()
                report = SyncReport(
                    version=version,
                    replicas=tuple(member.result() for member in members) + asleep,
                    num_bytes=outcome.num_bytes,
                    seconds=rounds.seconds,
                    digest=outcome.digest,
                    changed=self._last is None or outcome.digest != self._last[1],
                )
                error = None
            except Exception as exc:
                error = describe(exc)
                raise
            finally:
                self._current = None
                for member in members:
                    self._emit(
                        "sync.replica",
                        version=version,
                        replica=member.name,
                        committed=member.committed,
                        phase=member.phase,
                        error=member.error,
                    )
                self._emit(
                    "sync.end",
                    version=version,
                    seconds=self._clock.now() - begun,
                    committed=sum(member.committed for member in members),
                    num_bytes=report.num_bytes if report is not None else 0,
                    digest=report.digest if report is not None else "",
                    changed=report.changed if report is not None else False,
                    error=error,
                )
            if not report.changed and self._last is not None and self._last[0] != version:
                _log.warning("version %d has the same weights as the sync before it: %s", version, report.digest)
            self._last = (version, report.digest)
            return report

    def versions(self) -> Mapping[str, int | None]:
        """Return replica id → committed version; None for an invalid one, and for all that sleep."""
        return dict(self._versions)

    async def sleep(self, *, deadline: Deadline) -> None:
        """Pause every replica that `SupportsSleep` and let it give its memory back. Idempotent.

        Raises `StateError` naming those that could not; they count as invalid, and as awake. Nothing can be kept over a
        sleep, so the pause is never `keep`.
        """
        mode: PauseMode = "abort" if self._settings.pause_mode == "keep" else self._settings.pause_mode

        async def sleep(replica: Replica) -> None:
            sleeper = _sleeper(replica)
            if sleeper is None:
                if replica.replica_id not in self._sleepless:
                    self._sleepless.add(replica.replica_id)
                    _log.warning("%s cannot sleep: it keeps its memory, and its weights", replica.replica_id)
                return
            if replica.replica_id in self._asleep:
                return
            self._set_version(replica, None)
            await replica.pause(mode, deadline=deadline)
            await sleeper.sleep(deadline=deadline)
            self._asleep.add(replica.replica_id)

        async with self._exclusive("putting replicas to sleep", deadline):
            await self._all("sleep", sleep, deadline)

    async def wake(self, *, deadline: Deadline) -> None:
        """Wake those that sleep. They are invalid, and paused, until the next `update_weights`. Idempotent.

        Raises `StateError` naming those that could not; they still count as asleep.
        """

        async def wake(replica: Replica) -> None:
            sleeper = _sleeper(replica)
            if sleeper is not None and replica.replica_id in self._asleep:
                await sleeper.wake(deadline=deadline)
                self._asleep.discard(replica.replica_id)

        async with self._exclusive("waking replicas", deadline):
            await self._all("wake", wake, deadline)

    async def add(self, replica: Replica, /) -> None:
        """Include `replica` from the next sync on. Idempotent; another object of the same id replaces the first.

        Raises `ConfigError` for one that cannot be paused as the settings say.
        """
        name = replica.replica_id
        if self._settings.pause_mode == "keep" and KEEP not in replica.capabilities:
            raise ConfigError(f"replica {name} cannot keep sequences over a sync; choose the pause mode abort or wait")
        if self._replicas.get(name) is not replica:
            self._replicas[name] = replica
            self._versions[name] = None
            self._asleep.discard(name)

    async def remove(self, replica_id: str, /) -> None:
        """Forget it. Harmless when it is unknown; a sync that is under way still finishes with it."""
        self._replicas.pop(replica_id, None)
        self._versions.pop(replica_id, None)
        self._asleep.discard(replica_id)

    async def close(self, *, deadline: Deadline) -> None:
        """End a sync that is under way, and forget all replicas. Idempotent. The sender is its owner's to close."""
        self._closed = True
        if self._current is not None:
            reason = "the checkpoint-engine manager was closed"
            await despite_cancellation(self._stop(reason, deadline), self._config.cleanup_limit_s)
        await bounded(
            self._lock.acquire(), subject="closing", holder="the running sync", deadline=deadline, clock=self._clock
        )
        self._lock.release()
        self._replicas.clear()
        self._versions.clear()
        self._asleep.clear()

    async def _stop(self, reason: str, deadline: Deadline) -> None:
        try:
            await bounded(
                self._sender.abort(reason, deadline=deadline),
                subject="aborting the sync",
                holder="sender",
                deadline=deadline,
                clock=self._clock,
            )
        except Exception as exc:
            _log.warning("aborting the running sync: %s", describe(exc))

    @asynccontextmanager
    async def _exclusive(self, subject: str, deadline: Deadline) -> AsyncIterator[None]:
        await bounded(
            self._lock.acquire(), subject=subject, holder="the call before it", deadline=deadline, clock=self._clock
        )
        try:
            if self._closed:
                raise StateError("the checkpoint-engine manager is closed")
            yield
        finally:
            self._lock.release()

    async def _all(self, what: str, act: Callable[[Replica], Coroutine[None, None, None]], deadline: Deadline) -> None:
        """Do `act` with all replicas at once; raise one error that names all that failed."""
        failed: dict[str, Exception] = {}

        async def one(replica: Replica) -> None:
            try:
                await bounded(
                    act(replica), subject=what, holder=replica.replica_id, deadline=deadline, clock=self._clock
                )
            except Exception as exc:
                self._set_version(replica, None)
                failed[replica.replica_id] = exc

        replicas = list(self._replicas.values())
        await asyncio.gather(*(one(replica) for replica in replicas))
        if failed:
            listed = "; ".join(f"{name}: {describe(exc)}" for name, exc in failed.items())
            first = next(iter(failed.values()))
            raise StateError(f"{len(failed)} of {len(replicas)} replicas failed to {what}: {listed}") from first

    def _set_version(self, replica: Replica, version: int | None) -> None:
        if self._replicas.get(replica.replica_id) is replica:
            self._versions[replica.replica_id] = version

    def _emit(self, name: str, **fields: JsonValue) -> None:
        self._events.emit(name, fields)


def _sleeper(replica: Replica) -> SupportsSleep | None:
    """Return `replica` when it claims to sleep."""
    return cast("SupportsSleep", replica) if SLEEP in replica.capabilities else None


if TYPE_CHECKING:

    def _is_manager(x: TransactionalManager) -> CheckpointEngineManager:
        return x
