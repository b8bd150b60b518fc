"""Moving weights from a trainer to replicas, as a transaction.

Two roles meet: senders, beside the trainer's ranks, and receivers, beside the engines' ranks. In-process Protocols
(`WeightSource`, `WeightSender`, `WeightReceiver`, `WeightTarget`) describe what lives in one rank; hosts are their
remote faces over all ranks, and only hosts are seen by the manager. Phases run in the order of `PHASES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import PauseMode, Replica

__all__ = [
    "PHASES",
    "CheckpointEngineManager",
    "CheckpointSettings",
    "EndpointInfo",
    "LoadReport",
    "Manifest",
    "Plan",
    "ReplicaSync",
    "SyncReport",
    "TensorMeta",
    "TopologyPlanner",
    "TransferReport",
    "Verification",
    "WeightBackend",
    "WeightReceiver",
    "WeightReceiverHost",
    "WeightSender",
    "WeightSenderHost",
    "WeightSource",
    "WeightTarget",
    "WireFormat",
]

Verification = Literal["full", "sampled"]
"""How much of each payload its digest reads: every byte, or a part of every stretch."""

PHASES = ("prepare", "plan", "pause", "connect", "transfer", "verify", "commit", "resume", "close")
"""Phases of one sync, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """What a backend writes or reads. A sender and a receiver fit when they share one."""

    format_id: str
    version: int
    layout: Literal["full", "sharded", "delta"] = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """One tensor on the wire."""

    name: str
    """Canonical name: the one in the Hugging Face checkpoint, without any wrapper's prefix."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, for example ``"bfloat16"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that one sync moves, in order."""

    version: int
    tensors: tuple[TensorMeta, ...]
    num_bytes: int
    """Sum over tensors of elements times element size, in wire dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointInfo:
    """Where one rank can be reached for one sync."""

    owner: str
    """Replica id, or ``"trainer"``."""
    rank: int
    """Rank within its owner."""
    node: str
    """Host name; backends that need one host compare it."""
    address: Mapping[str, str] = field(default_factory=dict)
    """What the backend's other side needs: names, ports, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who sends to whom. Pure data: the same endpoints give the same plan."""

    session: str
    """Unique per sync; part of every name that the sync creates."""
    version: int
    manifest: Manifest
    senders: tuple[EndpointInfo, ...]
    receivers: tuple[EndpointInfo, ...]
    """All receiver ranks, in order; a receiver finds its place by owner and rank."""
    bucket_bytes: int
    """Most payload bytes in one piece of the stream."""
    verification: Verification = "full"
    """What the digests of both sides read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What one rank sent or received."""

    owner: str
    rank: int
    tensors: int
    num_bytes: int
    seconds: float
    digests: Mapping[str, int]
    """Canonical name → 64-bit position-dependent hash of the payload in wire dtype."""
    skipped: tuple[str, ...] = ()
    """Names received and deliberately not loaded, for example a tied head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a target did with the tensors that it was given."""

    loaded: tuple[str, ...]
    skipped: tuple[str, ...] = ()


class WeightSource(Protocol):
    """A trainer's weights, one canonical tensor at a time, never all at once.

    With several ranks each one iterates, since gathering is collective; the tensors are complete on rank 0 only.
    """

    def manifest(self, version: int, /) -> Manifest:
        """Return names, shapes and dtypes in the order of `tensors`."""
        ...

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor on the wire's dtype. It is valid until the next one is asked for; strides are arbitrary."""
        ...


class WeightTarget(Protocol):
    """An engine's weights, as a receiver fills them. Called from one thread while the engine decodes nothing."""

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Copy each tensor in before the next is taken; it is valid no longer. Raises `WeightSyncError`.

        Unknown names, wrong shapes and missing names are errors that list them. After an error the weights are mixed.
        """
        ...


class WeightSender(Protocol):
    """One trainer rank's half of a transfer. Blocking; runs on the rank's compute thread, except `abort`.

    `prepare` → `send` → `close`, again and again. `abort` may come from another thread at any time and ends a blocked
    `send`. A `close` while a `send` still runs is legal too, and so is the next `prepare`.
    """

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Create what receivers need in order to connect."""
        ...

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Stream everything. Raises `WeightSyncError` naming the missing peers, at the deadline at the latest."""
        ...

    def abort(self, reason: str, /) -> None:
        """Make a blocked `send` raise, and tell the receivers."""
        ...

    def close(self) -> None:
        """Remove everything that `prepare` created. Idempotent, legal in every state."""
        ...


class WeightReceiver(Protocol):
    """One engine rank's half of a transfer. Blocking; runs on the rank's compute thread, except `abort`.

    `prepare` → `receive` → `close`, again and again, with `abort` and `close` at any time, as for a `WeightSender`.
    """

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Create what the sender needs in order to connect."""
        ...

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole stream. Raises `WeightSyncError` for a cut, corrupt or incomplete one."""
        ...

    def abort(self, reason: str, /) -> None:
        """Make a blocked `receive` raise, and tell the sender."""
        ...

    def close(self) -> None:
        """Remove everything that `prepare` created. Idempotent, legal in every state."""
        ...


class TopologyPlanner(Protocol):
    """Decides who sends to whom. Pure: no process, no clock, no network."""

    def plan(
        self,
        manifest: Manifest,
        /,
        *,
        session: str,
        senders: Sequence[EndpointInfo],
        receivers: Sequence[EndpointInfo],
        bucket_bytes: int,
    ) -> Plan:
        """Return the plan. Raises `ConfigError` for endpoints that the backend cannot connect, naming both."""
        ...


class WeightBackend(Protocol):
    """A way to move weights: three classes and what they speak. Never instantiated, so it has no methods."""

    sender_class: ClassVar[type[WeightSender]]
    """Called as ``sender_class(owner=..., rank=..., clock=...)``."""
    receiver_class: ClassVar[type[WeightReceiver]]
    """Called as ``receiver_class(owner=..., clock=...)``."""
    planner_class: ClassVar[type[TopologyPlanner]]
    """Called without arguments."""
    wire_formats: ClassVar[tuple[WireFormat, ...]]


class WeightSenderHost(Protocol):
    """All sender ranks of a trainer. One sync at a time: `prepare` → `transfer` → `close`, `abort` at any time."""

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        """Prepare each rank."""
        ...

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Send everything; one report per rank that sent."""
        ...

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer that is under way. Idempotent."""
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created. Idempotent."""
        ...


class WeightReceiverHost(Protocol):
    """All receiver ranks of one replica. One sync at a time: `prepare` → `transfer` → `commit` → `close`."""

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        """Prepare each rank; check the manifest against the engine's parameters."""
        ...

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Load everything; one report per rank. From its start until `commit` the replica is invalid."""
        ...

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        """Make the loaded weights the replica's `version`. Drops cached prefixes unless `keep_cache`."""
        ...

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer that is under way; the replica stays invalid if one had begun. Idempotent."""
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSync:
    """How one sync went for one replica."""

    replica: str
    committed: bool
    phase: str
    """Last phase that was entered."""
    error: str | None = None
    """First cause; None when committed."""
    tensors: int = 0
    num_bytes: int = 0
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """How one sync went."""

    version: int
    replicas: tuple[ReplicaSync, ...]
    num_bytes: int
    """Payload bytes sent to each replica."""
    seconds: Mapping[str, float]
    """Phase → seconds."""
    digest: str
    """Hash over all tensors, as hexadecimal; changes when any byte does."""
    changed: bool
    """Whether the digest differs from that of the previous sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """What every checkpoint-engine manager is told."""

    backend: str = "shm"
    """Name or class path of the `WeightBackend`."""
    bucket_bytes: int = 32 * 1024 * 1024
    verification: Verification = "full"
    pause_mode: PauseMode = "abort"
    phase_limit_s: float = 60.0
    """Longest that any phase may take."""
    min_healthy: int = 1
    """Replicas that must commit for a sync to succeed."""
    replicas_at_once: int | None = None
    """Most replicas that are paused at the same time, while the others go on with the version before; None for all.

    The weights are sent, and gathered, once for each round.
    """
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for the implementation's `Config`."""


class CheckpointEngineManager(Protocol):
    """Brings replicas to a version. The one plug-in point for weight movement.

    `create` → `update_weights` any number of times → `close`. Calls are serialized.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the implementation's own options."""

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
        """Make a manager; move nothing yet."""
        ...

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        """Bring every replica to `version`. Afterwards no replica is paused or serves anything but a verified version.

        Raises `WeightSyncError` when fewer than `min_healthy` replicas committed. Replicas that failed are invalid and
        take part again in the next call.
        """
        ...

    def versions(self) -> Mapping[str, int | None]:
        """Return replica id → committed version; None for an invalid one."""
        ...

    async def sleep(self, *, deadline: Deadline) -> None:
        """Pause every replica that `SupportsSleep` and let it give its memory back. Idempotent."""
        ...

    async def wake(self, *, deadline: Deadline) -> None:
        """Wake those that sleep. They are invalid until the next `update_weights`. Idempotent."""
        ...

    async def add(self, replica: Replica, /) -> None:
        """Include `replica` from the next sync on. Idempotent."""
        ...

    async def remove(self, replica_id: str, /) -> None:
        """Forget it. Harmless when it is unknown."""
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Release everything. Idempotent."""
        ...
