"""The smallest runtime that meets the contract: objects in this process, everything inline.

Meant for virtual time: plain methods run at once on the event loop, so nothing waits for a thread. It places anything
that fits into `num_cpus`, and keeps no logs.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.errors import ActorFailed, ResourcesError, StateError
from verl_contracts.failures import FailureRecord
from verl_contracts.plugins.config import build_config
from verl_contracts.plugins.finding import find_class
from verl_contracts.runtime import ActorContext, ActorRef, DeviceGrant, PayloadRef
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.runtime import ActorSpec, PlacementRequest, Runtime, RuntimeSettings

__all__ = ["InProcessConfig", "InProcessRuntime"]


@dataclass(slots=True)
class _Actor:
    target: object
    calls: set[asyncio.Task[object]]
    dead: FailureRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessConfig:
    """Options of `InProcessRuntime`."""

    num_cpus: float = 64.0
    """CPUs that may be placed."""


class InProcessRuntime:
    """Actors as plain objects on one event loop."""

    Config: ClassVar[type] = InProcessConfig

    def __init__(self, settings: RuntimeSettings, *, clock: Clock, events: EventSink) -> None:
        self._settings = settings
        self._config = build_config(InProcessConfig, settings.options, key="runtime.options")
        self._clock = clock
        self._events = events
        self._actors: dict[str, _Actor] = {}
        self._grants: dict[int, DeviceGrant] = {}
        self._ids = itertools.count()
        self._failures: asyncio.Queue[FailureRecord | None] = asyncio.Queue()
        self._closed = False

    @classmethod
    async def create(cls, settings: RuntimeSettings, /, *, clock: Clock, events: EventSink) -> Self:
        """Return a runtime with nothing in it."""
        return cls(settings, clock=clock, events=events)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._settings.run_id

    @property
    def clock(self) -> Clock:
        """The clock it was made with."""
        return self._clock

    def report(self, record: FailureRecord, /) -> None:
        """Put a failure on the channel: the `FailureSink` of every actor."""
        self._failures.put_nowait(record)

    async def place(self, request: PlacementRequest, /, *, deadline: Deadline) -> DeviceGrant:
        """Count CPUs."""
        held = {grant.pool: sum(b.cpus for b in grant.bundles) for grant in self._grants.values()}
        free = self._config.num_cpus - sum(held.values())
        wanted = sum(bundle.cpus for bundle in request.bundles)
        if wanted > free or any(bundle.gpus for bundle in request.bundles):
            raise ResourcesError(f"pool {request.pool!r} wants {wanted} CPUs; {free} are free; held: {held}")
        key = next(self._ids)
        grant = DeviceGrant(pool=request.pool, bundles=request.bundles, token=key)
        self._grants[key] = grant
        return grant

    async def release(self, grant: DeviceGrant, /) -> None:
        """Forget the grant."""
        if isinstance(grant.token, int):
            self._grants.pop(grant.token, None)

    async def spawn(self, spec: ActorSpec, /, *, deadline: Deadline) -> ActorRef:
        """Build the object here."""
        if self._closed:
            raise StateError("the runtime is closed")
        context = ActorContext(
            run_id=self.run_id, role=spec.role, rank=spec.rank, caller=self, clock=self._clock, failures=self
        )
        try:
            target = find_class(spec.target.path, key="target", role=spec.role)(
                context=context, **spec.target.arguments
            )
        except Exception as exc:
            raise ActorFailed(FailureRecord.from_exception(exc, role=spec.role, rank=spec.rank)) from exc
        name = f"{self.run_id}/{spec.role}/{spec.rank}#{next(self._ids)}"
        self._actors[name] = _Actor(target=target, calls=set())
        return ActorRef(name=name, role=spec.role, rank=spec.rank)

    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        """Call the object on this loop."""
        held = self._live(actor)
        function = getattr(held.target, method)
        kwargs = dict(arguments)
        if "deadline" in inspect.signature(function).parameters:
            kwargs["deadline"] = deadline

        async def invoke() -> object:
            result = function(**kwargs)
            return await result if inspect.isawaitable(result) else result  # wait: bounded below, as a task

        task = asyncio.ensure_future(invoke())
        held.calls.add(task)
        task.add_done_callback(held.calls.discard)
        try:
            return await bounded(
                task,
                subject=f"{actor.role}[{actor.rank}].{method}",
                holder=actor.name,
                deadline=deadline,
                clock=self._clock,
            )
        except asyncio.CancelledError:
            if held.dead is not None:
                raise ActorFailed(held.dead) from None
            raise

    async def put(self, value: object, /) -> PayloadRef:
        """Keep the value inside the reference."""
        return PayloadRef(num_bytes=0, value=value)

    async def get(self, ref: PayloadRef, /, *, deadline: Deadline) -> object:
        """Return the value inside."""
        return ref.value

    async def watch(self) -> AsyncIterator[FailureRecord]:
        """Yield what `report` was given."""
        while (record := await self._failures.get()) is not None:  # wait: ends at close
            yield record

    def fail(self, actor: ActorRef, cause: str) -> None:
        """Make an actor die as if its process had: for tests."""
        record = FailureRecord(role=actor.role, rank=actor.rank, node="localhost", cause=cause)
        self._end(actor, record)
        self.report(record)

    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        """Forget the object; its calls raise `ActorFailed`."""
        held = self._actors.get(actor.name)
        if held is None or held.dead is not None:
            return
        close = getattr(held.target, "close", None)
        if callable(close):
            result = close()
            if inspect.isawaitable(result):
                await bounded(
                    result, subject=f"{actor.name}.close", holder=actor.name, deadline=deadline, clock=self._clock
                )
        self._end(actor, FailureRecord(role=actor.role, rank=actor.rank, node="localhost", cause="killed"))

    async def close(self, *, deadline: Deadline) -> None:
        """End every actor and the failure channel."""
        if self._closed:
            return
        self._closed = True
        for name, held in self._actors.items():
            role, rank = name.split("/")[1], name.split("/")[2].split("#")[0]
            if held.dead is None:
                await self.kill(ActorRef(name=name, role=role, rank=int(rank)), deadline=deadline)
        self._grants.clear()
        self._failures.put_nowait(None)

    def _live(self, actor: ActorRef) -> _Actor:
        held = self._actors.get(actor.name)
        if held is None:
            raise ActorFailed(FailureRecord(role=actor.role, rank=actor.rank, node="localhost", cause="no such actor"))
        if held.dead is not None:
            raise ActorFailed(held.dead)
        return held

    def _end(self, actor: ActorRef, record: FailureRecord) -> None:
        held = self._actors[actor.name]
        held.dead = record
        for task in tuple(held.calls):
            task.cancel()


if TYPE_CHECKING:

    def _is_runtime(x: InProcessRuntime) -> Runtime:
        return x
