"""`RayRuntime`: the driver's side. Places, spawns, watches and stops actors on Ray.

Owns the list of actors and their pools. Every actor has one long poll open, so a death is known when Ray knows it; and
the driver's heart beats on a thread of its own, so that a busy driver is not mistaken for a dead one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.errors import ActorFailed, ConfigError, StateError, WaitTimeout
from verl_contracts.failures import FailureRecord
from verl_contracts.runtime import ActorRef, DeviceGrant
from verl_contracts.waits import bounded
from verl_runtime.failures import FailureChannel
from verl_runtime.pools import Pools, check_request
from verl_runtime.processes import sweep
from verl_runtime.ray.caller import RayCaller
from verl_runtime.ray.connection import Connection, require_ray
from verl_runtime.ray.elsewhere import run_on_node
from verl_runtime.ray.guardian import Guardian
from verl_runtime.ray.handles import Handle, Pulse, open_handle
from verl_runtime.ray.placement import open_group, remove_group
from verl_runtime.ray.wire import Boot, RayAddress, pack
from verl_runtime.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ray.util.placement_group import PlacementGroup

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.runtime import ActorSpec, PayloadRef, PlacementRequest, Runtime, RuntimeSettings

__all__ = ["RayConfig", "RayRuntime"]

_log = logging.getLogger(__name__)
_CLOSE_SHARE = 0.6
"""Part of a deadline that the object's own `close` may take; the rest is for ending the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Options of the Ray runtime."""

    address: str | None = None
    """Cluster to join; None starts Ray on this machine, for this process alone."""
    num_cpus: int | None = None
    """CPUs of the Ray that is started; None means all of this machine."""
    object_store_mb: int = 512
    """Shared memory of the Ray that is started, in MiB."""
    namespace: str | None = None
    """Beginning of the Ray namespace of the actors, which is completed to one that no other run has."""

    def __post_init__(self) -> None:
        if self.num_cpus is not None and self.num_cpus < 1:
            raise ValueError(f"num_cpus must be ≥ 1, got {self.num_cpus}; leave it out for all of this machine")
        found = find_spec("ray")
        if found is None or found.origin is None:  # no origin: a mere folder of that name, as Ray leaves one in /tmp
            raise ConfigError("the Ray runtime needs Ray: pip install 'verl-runtime[ray]', or choose runtime=local")


@dataclass(slots=True, eq=False, kw_only=True)
class _Actor:
    ref: ActorRef
    address: RayAddress
    handle: Handle
    pid: int = 0
    monitor: asyncio.Task[None] | None = None
    ended: bool = False


class RayRuntime:
    """Runs actors as Ray actors. Used from one event loop."""

    Config: ClassVar[type] = RayConfig

    def __init__(self, settings: RuntimeSettings, *, config: RayConfig, clock: Clock, events: EventSink) -> None:
        self._settings = settings
        self._clock = clock
        self._events = events
        self._caller = RayCaller(clock=clock)
        self._failures = FailureChannel()
        self._pools = Pools()
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: dict[str, _Actor] = {}
        self._counts: dict[tuple[str, int], itertools.count[int]] = {}
        self._namespace = f"{config.namespace or f'verl-{settings.run_id}'}-{secrets.token_hex(4)}"
        self._closed = False
        self._connection = Connection(
            address=config.address, num_cpus=config.num_cpus, object_store_mb=config.object_store_mb
        )
        own_folder = tempfile.mkdtemp(prefix=f"{self._namespace}-") if settings.log_dir is None else None
        self._log_dir = Path(settings.log_dir or own_folder or "").absolute()
        self._guardian = Guardian(namespace=self._namespace, folder=own_folder)
        self._pulse = Pulse(every_s=settings.owner_limit_s / 5)

    @classmethod
    async def create(cls, settings: RuntimeSettings, /, *, clock: Clock, events: EventSink) -> Self:
        """Start Ray or join it. Blocks the event loop for some seconds when Ray has to be started."""
        config = read_settings(settings, RayConfig)
        require_ray()
        return cls(settings, config=config, clock=clock, events=events)

    @property
    def run_id(self) -> str:
        """Name of this run."""
        return self._settings.run_id

    @property
    def clock(self) -> Clock:
        """The driver's clock."""
        return self._clock

    async def place(self, request: PlacementRequest, /, *, deadline: Deadline) -> DeviceGrant:
        """Reserve devices in a placement group."""
        self._check_open()
        check_request(request)
        key = self._pools.next_key(request)
        group = await open_group(
            request,
            name=f"{self._namespace}/{key}",
            pools=self._pools,
            alone=self._connection.alone,
            deadline=deadline,
            clock=self._clock,
        )
        self._pools.open(key, request)
        self._groups[key] = group
        self._events.emit("runtime.placed", {"pool": request.pool, "bundles": len(request.bundles)})
        return DeviceGrant(pool=request.pool, bundles=request.bundles, token=key)

    async def release(self, grant: DeviceGrant, /) -> None:
        """Give devices back. Harmless when done twice."""
        if self._drop_pool(str(grant.token)):
            self._events.emit("runtime.released", {"pool": grant.pool})

    async def spawn(self, spec: ActorSpec, /, *, deadline: Deadline) -> ActorRef:
        """Start a process, build the object in it, and return once it is there."""
        self._check_open()
        count = self._counts.setdefault((spec.role, spec.rank), itertools.count(1))
        number = next(count)
        name = f"{self.run_id}/{spec.role}/{spec.rank}.{number}"
        log_path = str(self._log_dir / f"{spec.role}-{spec.rank}.{number}.log")
        if spec.grant is not None:
            self._pools.join(name, spec.grant, spec.bundle, key=str(spec.grant.token))
        try:
            actor = self._start(spec, name=name, log_path=log_path)
        except BaseException:
            self._pools.leave(name)
            raise
        self._actors[name] = actor
        try:
            await self._settle(actor, spec, deadline=deadline)
        except BaseException:
            self._end(actor, "stopped: it did not start", failed=True)
            raise
        self._events.emit("runtime.spawned", {"actor": name, "pid": actor.pid})
        return actor.ref

    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        """Call a method of an actor; calls of one tick travel together."""
        return await self._caller.call(actor, method, arguments, deadline=deadline)

    async def put(self, value: object, /) -> PayloadRef:
        """Keep the value inside the reference when small, else in this node's store."""
        return await self._caller.put(value)

    async def get(self, ref: PayloadRef, /, *, deadline: Deadline) -> object:
        """Return the value."""
        return await self._caller.get(ref, deadline=deadline)

    def watch(self) -> AsyncIterator[FailureRecord]:
        """Yield each failure once, until `close`."""
        return self._failures.watch()

    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        """Let the object close, then end its process and its children."""
        host = self._actors.get(actor.name)
        if host is not None and not host.ended:
            await self._stop(host, "stopped by its owner", deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Stop every actor, give back every pool, and end Ray if it was started here."""
        if self._closed:
            return
        self._closed = True
        cause = "stopped: the runtime was closed"
        stops = (self._stop(host, cause, deadline=deadline) for host in self._actors.values() if not host.ended)
        try:
            await asyncio.gather(*stops)
        finally:
            for key in self._pools.open_keys():
                self._drop_pool(key)
            self._failures.close()
            self._pulse.close()
            self._connection.close()
            self._guardian.close()

    def exchanges(self, actor: ActorRef) -> int:
        """Return how many remote calls the calls to `actor` have cost so far: for measuring."""
        return self._caller.exchanges(actor)

    def _start(self, spec: ActorSpec, *, name: str, log_path: str) -> _Actor:
        cpus = gpus = 0.0
        group = None
        if spec.grant is not None:
            bundle = spec.grant.bundles[spec.bundle]
            cpus, gpus = bundle.cpus * spec.grant.share, bundle.gpus * spec.grant.share
            group = self._groups[str(spec.grant.token)]
        target = pack(spec.target)
        boot = Boot(
            name=name,
            role=spec.role,
            rank=spec.rank,
            run_id=self.run_id,
            namespace=self._namespace,
            target=target.data,
            target_refs=target.refs,
            sys_path=tuple(path or str(Path.cwd()) for path in sys.path),
            env={"OMP_NUM_THREADS": str(max(1, round(cpus))), **spec.env},
            log_path=log_path,
            owner_limit_s=self._settings.owner_limit_s,
        )
        handle = open_handle(
            boot, namespace=self._namespace, cpus=cpus, gpus=gpus, group=group, bundle=spec.bundle, env=dict(spec.env)
        )
        address = RayAddress(namespace=self._namespace, log_path=log_path)
        ref = ActorRef(name=name, role=spec.role, rank=spec.rank, token=address)
        return _Actor(ref=ref, address=address, handle=handle)

    async def _settle(self, actor: _Actor, spec: ActorSpec, *, deadline: Deadline) -> None:
        who = f"{spec.role}[{spec.rank}]"
        self._pulse.add(actor.ref.name, actor.handle)
        try:
            birth = await bounded(
                actor.handle.born(),
                subject=f"a process for {who}",
                holder="Ray",
                deadline=deadline,
                clock=self._clock,
            )
            actor.pid = birth.pid
            actor.address = replace(actor.address, node=birth.node, node_id=birth.node_id)
            actor.ref = replace(actor.ref, token=actor.address)
            if actor.address.node == socket.gethostname():
                self._guardian.watch(birth.pid)
            failure = await bounded(
                actor.handle.build(),
                subject=f"start of {who}",
                holder=actor.ref.name,
                deadline=deadline,
                clock=self._clock,
            )
        except WaitTimeout:
            raise
        except Exception as exc:  # Ray's many errors for a process that is gone
            raise ActorFailed(await self._caller.examine(actor.ref, exc)) from exc
        if failure is not None:
            raise ActorFailed(failure)
        if actor.ended or self._closed:
            raise StateError(f"{who} was stopped while it started")
        self._caller.open_port(actor.ref, actor.handle.exchange)
        actor.monitor = asyncio.get_running_loop().create_task(self._monitor(actor))

    async def _monitor(self, actor: _Actor) -> None:
        """Carry reports to the failure channel until the actor is gone, then report that."""
        while True:
            try:
                reports = await actor.handle.listen()
            except Exception as exc:  # Ray's many errors for a process that is gone
                error = exc
                break
            for report in reports:
                self._failures.report(report)
        if actor.ended:
            return
        record = await self._caller.examine(actor.ref, error)
        if not actor.ended:
            self._end(actor, record.cause, record=record, failed=True)
            self._failures.report(record)

    async def _stop(self, actor: _Actor, cause: str, *, deadline: Deadline) -> None:
        """End an actor in order: fail its calls, close its object, kill its children, kill it."""
        actor.ended = True
        record = self._record(actor, cause)
        self._caller.fail(actor.ref, record)
        limit_s = deadline.remaining(self._clock) * _CLOSE_SHARE
        try:
            await asyncio.wait_for(actor.handle.stop(limit_s), limit_s + 0.5)
        except TimeoutError:
            _log.warning("%s did not close within %.3g s; its process is killed", actor.ref.name, limit_s)
        except Exception as exc:  # it is gone already
            _log.debug("%s was gone before it could close: %s", actor.ref.name, exc)
        finally:
            self._end(actor, cause, record=record)
        if actor.monitor is not None:
            await asyncio.wait({actor.monitor}, timeout=deadline.remaining(self._clock))

    def _end(self, actor: _Actor, cause: str, *, record: FailureRecord | None = None, failed: bool = False) -> None:
        """Make sure that nothing is left of an actor, whatever state it is in."""
        actor.ended = True
        self._pulse.remove(actor.ref.name)
        actor.handle.kill()
        self._sweep(actor)
        self._pools.leave(actor.ref.name)
        self._caller.fail(actor.ref, record or self._record(actor, cause))
        self._events.emit("runtime.ended", {"actor": actor.ref.name, "cause": cause, "failed": failed})

    def _sweep(self, actor: _Actor) -> None:
        """Kill the children that an actor left, on its own node."""
        mark = f"{self._namespace}/{actor.ref.name}"
        if actor.address.node == socket.gethostname():
            sweep(mark=mark, groups=(actor.pid,) if actor.pid else ())
            self._guardian.forget(actor.pid)
        elif actor.address.node_id:
            run_on_node(actor.address.node_id, sweep, mark=mark, groups=(actor.pid,))

    @staticmethod
    def _record(actor: _Actor, cause: str) -> FailureRecord:
        return FailureRecord(role=actor.ref.role, rank=actor.ref.rank, node=actor.address.node, cause=cause)

    def _drop_pool(self, key: str) -> bool:
        group = self._groups.pop(key, None)
        if group is not None:
            remove_group(group)
        return self._pools.drop(key)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"runtime of run {self.run_id!r} is closed")


if TYPE_CHECKING:

    def _is_runtime(x: RayRuntime) -> Runtime:
        return x
