"""The weight receiver of an engine whose weights lie in its own process: one rank, driven from the event loop.

Owns the order of an update on the engine's side; refuses to know transports and schedules. The failure that it prevents
is an engine that serves weights of which nobody knows whether they arrived: from the first byte of a transfer until its
commit the engine is invalid, whatever goes wrong in between.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeVar

from verl_contracts.errors import StateError
from verl_contracts.plugins import build_plugin, families, load_plugin
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import (
        EndpointInfo,
        Manifest,
        Plan,
        TransferReport,
        WeightReceiver,
        WeightReceiverHost,
        WeightTarget,
    )

__all__ = ["InProcessReceiverHost", "Updatable", "not_loaded", "receiver_class"]

T = TypeVar("T")


class Updatable(Protocol):
    """An engine whose weights a receiver of the same process fills.

    `check_manifest`, `begin_update` and the target may be used from any thread.
    """

    def check_manifest(self, manifest: Manifest, /) -> None:
        """Raise `WeightSyncError` unless these tensors fill the model: before a sync touches anything. Any time."""
        ...

    def begin_update(self) -> None:
        """Declare the weights invalid, until `commit`. Raises `StateError` unless paused and awake."""
        ...

    def target(self) -> WeightTarget:
        """Return what a receiver fills: it writes into the live model. Only between `begin_update` and `commit`."""
        ...

    async def commit(self, version: int, /, *, keep_cache: bool) -> None:
        """Declare the loaded weights to be `version`. Frozen sequences go on over their old cache if `keep_cache`.

        Otherwise their cache is computed again. Raises `StateError` unless an update was begun and fully loaded.
        """
        ...


def receiver_class(backend: str, *, role: str) -> type[WeightReceiver]:
    """Return the receiver of the `WeightBackend` called `backend`. Raises `ConfigError` naming `role`."""
    family = families.WEIGHT_BACKEND
    return load_plugin(family, backend, key=family.key, role=role).receiver_class


def not_loaded(replica: str, version: int, *, begun: bool) -> StateError:
    """Return the error of a commit that nothing was loaded for."""
    found = "the weights are not loaded completely" if begun else "no update was begun"
    return StateError(f"replica {replica} cannot commit version {version}: {found}")


class InProcessReceiverHost:
    """A `WeightReceiverHost` over one engine. What blocks runs on threads, so the loop answers meanwhile."""

    def __init__(self, engine: Updatable, *, backend: str, owner: str, clock: Clock, threads: bool = True) -> None:
        """Make the host; the backend is loaded at the first sync. Without `threads`, for virtual clocks, it blocks."""
        self._engine = engine
        self._backend = backend
        self._owner = owner
        self._clock = clock
        self._threads = threads
        self._receiver: WeightReceiver | None = None
        """Made for the first sync and kept for all: what it has mapped serves the next one too."""
        self._prepared = False

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        """Create what the sender needs in order to connect. A session left over from another sync is closed."""
        return (await self._on_thread(lambda: self._prepare(manifest, session), "prepare", deadline),)

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Load the whole stream into the engine, which is invalid from here until `commit`."""
        return (await self._on_thread(lambda: self._transfer(plan, deadline), "transfer", deadline),)

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        """Make what was loaded the engine's `version`."""
        await self._engine.commit(version, keep_cache=keep_cache)

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """Make a transfer that is under way raise."""
        if self._receiver is not None and self._prepared:
            self._receiver.abort(reason)

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created."""
        await self._on_thread(self._close, "close", deadline)

    def shut_down(self) -> None:
        """End a transfer that is under way, and drop the receiver. Before the engine closes."""
        if self._receiver is not None:
            self._receiver.abort("the replica closes")
            self._close()
            self._receiver = None

    def _prepare(self, manifest: Manifest, session: str) -> EndpointInfo:
        self._close()
        self._engine.check_manifest(manifest)
        if self._receiver is None:
            self._receiver = build_plugin(
                receiver_class(self._backend, role=self._owner),
                {},
                key=families.WEIGHT_BACKEND.key,
                arguments={"owner": self._owner, "clock": self._clock},
            )
        self._prepared = True
        return self._receiver.prepare(session=session, rank=0)

    def _transfer(self, plan: Plan, deadline: Deadline) -> TransferReport:
        if self._receiver is None or not self._prepared:
            raise StateError(f"{self._owner}: a transfer of {plan.session} was asked for, and nothing is prepared")
        self._engine.begin_update()
        return self._receiver.receive(plan, self._engine.target(), deadline=deadline)

    def _close(self) -> None:
        if self._receiver is not None and self._prepared:
            self._prepared = False
            self._receiver.close()

    async def _on_thread(self, act: Callable[[], T], what: str, deadline: Deadline) -> T:
        if not self._threads:
            return act()
        return await bounded(
            asyncio.to_thread(act),
            subject=f"{what} of a weight sync",
            holder=self._owner,
            deadline=deadline,
            clock=self._clock,
        )


if TYPE_CHECKING:

    def _is_host(x: InProcessReceiverHost) -> WeightReceiverHost:
        return x
