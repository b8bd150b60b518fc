"""Where processes live. One contract, met by Ray and by an in-process twin.

Actors are ordinary objects, built where they live from an `ActorSpec`. They are called by method name with keyword
arguments; calls made to one actor within one tick of the event loop may travel together, so callers need not batch.
No other Protocol is ever met by an actor handle: packages wrap `Caller.call` in a proxy of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from verl_contracts.pickling import cheap_pickle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.failures import FailureRecord, FailureSink

__all__ = [
    "ActorContext",
    "ActorRef",
    "ActorSpec",
    "Bundle",
    "Caller",
    "DeviceGrant",
    "ObjectSpec",
    "PayloadRef",
    "PlacementRequest",
    "Runtime",
    "RuntimeSettings",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources that must lie on one node. On CPU a device is one core and one thread."""

    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Devices wanted under one name."""

    pool: str
    """Name of the pool, for messages and for who-holds-what."""
    bundles: tuple[Bundle, ...]
    strategy: Literal["pack", "spread", "strict_pack"] = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrant:
    """Devices that were granted. Handed to whoever may spawn on them; released by whoever placed them."""

    pool: str
    bundles: tuple[Bundle, ...]
    share: float = 1.0
    """Part of each device that the holder of this grant may use, in (0, 1]."""
    token: object = field(default=None, repr=False)
    """Opaque to all but the runtime that made it."""

    def shared(self, share: float) -> DeviceGrant:
        """Return this grant with another share."""
        return replace(self, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSpec:
    """How to build an object in another process: a class path and keyword arguments that can be pickled.

    The class is called as ``Class(context=ActorContext, **arguments)``, on the actor's compute thread, because it may
    load a model for minutes: an object that needs the event loop starts its tasks in its first `async def` method. A
    method ``close()``, plain or async, is optional; it is called, for a limited time, before the actor is stopped.
    """

    path: str
    """``package.module:Class``."""
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """One actor to spawn."""

    role: str
    """What it is, for example ``"replica"``; part of its name."""
    rank: int
    """Distinguishes actors of one role."""
    target: ObjectSpec
    """The object that it hosts."""
    grant: DeviceGrant | None = None
    """Devices to run on; None for a control process, which takes none."""
    bundle: int = 0
    """Index into the grant's bundles."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set before the object's module is imported; ignored by an in-process runtime."""


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """Names one actor. Can be pickled and used through the `Caller` of any process of the same run."""

    name: str
    """Unique in the cluster: run id, role and rank."""
    role: str
    rank: int
    token: object = field(default=None, repr=False, compare=False)
    """Opaque to all but the runtime."""


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """A value that stays where it was made until somebody gets it. Small values travel inside."""

    num_bytes: int
    """Size as pickled, or 0 when the value travels inside and was never measured."""
    value: object = field(default=None, repr=False)
    """The value itself when `token` is None; else whatever the runtime keeps in here."""
    token: object = field(default=None, repr=False)
    """Opaque to all but the runtime; None when `value` is the value."""


class Caller(Protocol):
    """Calling actors and passing values: what an actor may do. A subset of `Runtime`, since actors do not spawn.

    Safe to use from one event loop. Cancelling a call cancels it at the actor as well.
    """

    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        """Call ``method(**arguments)`` on `actor` and return its result.

        A method with a keyword `deadline` receives this deadline, rebased onto the actor's clock. An `async def` method
        runs on the actor's event loop, many at a time; a plain one on the actor's single compute thread, one at a time.
        Raises what the method raised; `ActorFailed` when the actor is dead; `WaitTimeout` at the deadline.
        """
        ...

    async def put(self, value: object, /) -> PayloadRef:
        """Keep `value` here and return a reference. Lives as long as a reference to it does."""
        ...

    async def get(self, ref: PayloadRef, /, *, deadline: Deadline) -> object:
        """Return the value. Raises `ActorFailed` when its keeper is gone, `WaitTimeout` at the deadline."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """What every runtime is told."""

    run_id: str
    """Unique in the cluster; letters, digits, ``-`` and ``_``."""
    log_dir: str | None = None
    """Folder for one log file per actor; None keeps none."""
    owner_limit_s: float = 10.0
    """Seconds of silence from the driver after which an actor ends itself."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for the implementation's `Config`."""


class Runtime(Caller, Protocol):
    """Places, spawns, watches and stops actors. Owned by the driver.

    Call order: `create`, then `place` and `spawn` in any order, `close` last. `close` is idempotent and leaves nothing
    behind, and it is also what happens when the driver dies: actors end themselves when their owner has been silent for
    long.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the implementation's own options."""

    @classmethod
    async def create(cls, settings: RuntimeSettings, /, *, clock: Clock, events: EventSink) -> Self:
        """Connect or start whatever is needed."""
        ...

    @property
    def run_id(self) -> str:
        """Name of this run, part of every actor's name."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock that deadlines are made on."""
        ...

    async def place(self, request: PlacementRequest, /, *, deadline: Deadline) -> DeviceGrant:
        """Reserve devices. Raises `ResourcesError` naming wanted, free per node and holders, leaving nothing behind."""
        ...

    async def release(self, grant: DeviceGrant, /) -> None:
        """Give devices back. Harmless when done twice."""
        ...

    async def spawn(self, spec: ActorSpec, /, *, deadline: Deadline) -> ActorRef:
        """Start an actor and return once its object is built. Raises `ActorFailed` with the constructor's own error."""
        ...

    def watch(self) -> AsyncIterator[FailureRecord]:
        """Yield each failure once: deaths of actors and what actors reported. Ends at `close`. One reader."""
        ...

    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        """Stop an actor and its children. Harmless when it is gone; not reported as a failure."""
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Stop every actor and release every grant. Idempotent; raises nothing for what is gone already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorContext:
    """What an object that lives in an actor is given: its name, its time, and how to reach others."""

    run_id: str
    role: str
    rank: int
    caller: Caller
    clock: Clock
    failures: FailureSink
