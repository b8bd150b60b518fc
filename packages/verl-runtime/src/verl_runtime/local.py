"""`LocalRuntime`: actors are objects in this process.

For tests, notebooks and machines without Ray. It keeps the semantics of processes where they can be had in one: calls
by name with a deadline, one compute thread per actor, pending calls that fail when their actor is killed, devices that
run out. It does not isolate memory: arguments are passed as they are, and a crash takes everything down.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.errors import ActorFailed, StateError
from verl_contracts.failures import FailureRecord
from verl_contracts.runtime import ActorContext, ActorRef, DeviceGrant, PayloadRef
from verl_contracts.waits import bounded
from verl_runtime.failures import FailureChannel
from verl_runtime.objects import Exited, HostedObject
from verl_runtime.pools import Free, Pools, check_request, fits, refusal
from verl_runtime.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.runtime import ActorSpec, PlacementRequest, Runtime, RuntimeSettings

__all__ = ["LocalConfig", "LocalRuntime"]

_UNWIND_S = 2.0
"""How long cancelled calls may take to unwind before their object is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Options of the in-process runtime."""

    threads: bool = True
    """Run plain methods on a thread of their actor; False runs them on the event loop, for virtual clocks."""
    num_cpus: float | None = None
    """CPUs that `place` may give away; None means all of this machine."""
    num_gpus: float = 0.0
    """GPUs that `place` may give away."""

    def __post_init__(self) -> None:
        if self.num_cpus is not None and not 0 < self.num_cpus < math.inf:
            raise ValueError(f"num_cpus must be > 0, got {self.num_cpus:g}; leave it out for all of this machine")
        if not 0 <= self.num_gpus < math.inf:
            raise ValueError(f"num_gpus must be ≥ 0, got {self.num_gpus:g}")


@dataclass(slots=True, eq=False)
class _Actor:
    ref: ActorRef
    hosted: HostedObject
    pending: dict[asyncio.Future[object], asyncio.Task[object]] = field(default_factory=dict)
    death: FailureRecord | None = None


class LocalRuntime:
    """Runs actors inside the driver. Used from one event loop."""

    Config: ClassVar[type] = LocalConfig

    def __init__(self, settings: RuntimeSettings, *, config: LocalConfig, clock: Clock, events: EventSink) -> None:
        self._settings = settings
        self._config = config
        self._clock = clock
        self._events = events
        self._failures = FailureChannel()
        self._pools = Pools()
        self._actors: dict[str, _Actor] = {}
        self._incarnations: dict[tuple[str, int], itertools.count[int]] = {}
        self._closed = False

    @classmethod
    async def create(cls, settings: RuntimeSettings, /, *, clock: Clock, events: EventSink) -> Self:
        """Return a runtime; there is nothing to start."""
        return cls(settings, config=read_settings(settings, LocalConfig), clock=clock, events=events)

    @property
    def run_id(self) -> str:
        """Name of this run."""
        return self._settings.run_id

    @property
    def clock(self) -> Clock:
        """The clock that the driver and every actor share."""
        return self._clock

    async def place(self, request: PlacementRequest, /, *, deadline: Deadline) -> DeviceGrant:
        """Reserve devices of this machine, at once or not at all."""
        self._check_open()
        check_request(request)
        held = self._pools.held()
        cpus = float(self._config.num_cpus if self._config.num_cpus is not None else os.cpu_count() or 1)
        nodes = {socket.gethostname(): Free(cpus=cpus - held.cpus, gpus=self._config.num_gpus - held.gpus)}
        if not fits(request, nodes):
            raise refusal(request, nodes, self._pools.holders())
        key = self._pools.next_key(request)
        self._pools.open(key, request)
        self._events.emit("runtime.placed", {"pool": request.pool, "bundles": len(request.bundles)})
        return DeviceGrant(pool=request.pool, bundles=request.bundles, token=key)

    async def release(self, grant: DeviceGrant, /) -> None:
        """Give devices back. Harmless when done twice."""
        if self._pools.drop(str(grant.token)):
            self._events.emit("runtime.released", {"pool": grant.pool})

    async def spawn(self, spec: ActorSpec, /, *, deadline: Deadline) -> ActorRef:
        """Build the object on its own thread and return once it is there."""
        self._check_open()
        count = self._incarnations.setdefault((spec.role, spec.rank), itertools.count(1))
        name = f"{self.run_id}/{spec.role}/{spec.rank}.{next(count)}"
        if spec.grant is not None:
            self._pools.join(name, spec.grant, spec.bundle, key=str(spec.grant.token))
        ref = ActorRef(name=name, role=spec.role, rank=spec.rank)
        actor = _Actor(ref, HostedObject(name=name, threads=self._config.threads))
        context = ActorContext(
            run_id=self.run_id,
            role=spec.role,
            rank=spec.rank,
            caller=self,
            clock=self._clock,
            failures=self._failures,
        )
        try:
            await bounded(
                self._build(actor, spec, context),
                subject=f"start of {spec.role}[{spec.rank}]",
                holder=name,
                deadline=deadline,
                clock=self._clock,
            )
        except BaseException:
            self._pools.leave(name)
            await actor.hosted.close(deadline=deadline, clock=self._clock)
            raise
        self._actors[name] = actor
        self._events.emit("runtime.spawned", {"actor": name})
        return ref

    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        """Call a method of an actor; its arguments and result are passed as they are."""
        host = self._find(actor)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[object] = loop.create_future()
        task = loop.create_task(host.hosted.invoke(method, arguments, deadline=deadline))
        host.pending[outcome] = task
        task.add_done_callback(lambda done: self._settle(host, outcome, done))
        try:
            return await bounded(
                outcome,
                subject=f"{actor.role}[{actor.rank}].{method}",
                holder=actor.name,
                deadline=deadline,
                clock=self._clock,
            )
        finally:
            host.pending.pop(outcome, None)
            task.cancel()

    async def put(self, value: object, /) -> PayloadRef:
        """Wrap the value; nothing is copied."""
        return PayloadRef(num_bytes=0, value=value)

    async def get(self, ref: PayloadRef, /, *, deadline: Deadline) -> object:
        """Return the very object that was put."""
        return ref.value

    def watch(self) -> AsyncIterator[FailureRecord]:
        """Yield each failure once, until `close`."""
        return self._failures.watch()

    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        """Fail the actor's pending calls, then close its object."""
        host = self._actors.get(actor.name)
        if host is not None and host.death is None:
            await self._end(host, "stopped by its owner", deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Stop every actor, newest first, and release every grant."""
        self._closed = True
        for host in reversed(list(self._actors.values())):
            if host.death is None:
                await self._end(host, "stopped: the runtime was closed", deadline=deadline)
        for key in self._pools.open_keys():
            self._pools.drop(key)
        self._failures.close()

    @staticmethod
    async def _build(actor: _Actor, spec: ActorSpec, context: ActorContext) -> None:
        try:
            await actor.hosted.build(spec.target, context)
        except (Exception, SystemExit) as exc:
            raise ActorFailed(FailureRecord.from_exception(exc, role=spec.role, rank=spec.rank)) from exc

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"runtime of run {self.run_id!r} is closed")

    def _find(self, actor: ActorRef) -> _Actor:
        host = self._actors.get(actor.name)
        if host is None:
            raise ActorFailed(self._record(actor, f"no actor named {actor.name!r} in run {self.run_id!r}"))
        if host.death is not None:
            raise ActorFailed(host.death)
        return host

    def _record(self, actor: ActorRef, cause: str) -> FailureRecord:
        return FailureRecord(role=actor.role, rank=actor.rank, node=socket.gethostname(), cause=cause)

    def _settle(self, host: _Actor, outcome: asyncio.Future[object], task: asyncio.Task[object]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exited) and host.death is None:
            self._die(host, str(error))
            self._failures.report(self._record(host.ref, str(error)))
        if outcome.done():
            return
        if task.cancelled():
            outcome.set_exception(ActorFailed(self._record(host.ref, "CancelledError: the method cancelled itself")))
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def _die(self, host: _Actor, cause: str) -> None:
        host.death = self._record(host.ref, cause)
        self._pools.leave(host.ref.name)
        for outcome, task in list(host.pending.items()):
            if not outcome.done():
                outcome.set_exception(ActorFailed(host.death))
            task.cancel()
        self._events.emit("runtime.ended", {"actor": host.ref.name, "cause": cause})

    async def _end(self, host: _Actor, cause: str, *, deadline: Deadline) -> None:
        tasks = set(host.pending.values())
        self._die(host, cause)
        if tasks:
            await asyncio.wait(tasks, timeout=deadline.within(self._clock, _UNWIND_S).remaining(self._clock))
        await host.hosted.close(deadline=deadline, clock=self._clock)


if TYPE_CHECKING:

    def _is_runtime(x: LocalRuntime) -> Runtime:
        return x
