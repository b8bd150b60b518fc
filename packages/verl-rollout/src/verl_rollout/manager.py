"""Owns a set of replicas and the balancer in front of them.

A replica serves only between `admit` and `exclude`: a new one holds no weights, and it is the driver, after a sync, who
knows that it does. What `create` or `add` started is stopped again when it fails half-way.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, cast

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, StateError, WaitTimeout
from verl_contracts.plugins import available, build_config, load_plugin
from verl_contracts.rollout import DEAD, OPENAI, SERVING, LLMClient
from verl_contracts.runtime import ActorContext, ActorSpec, Bundle, ObjectSpec
from verl_rollout.addresses import ReplicaAddress, answer
from verl_rollout.engine_family import ENGINE, ENGINE_KEY, ENGINE_OPTIONS_KEY
from verl_rollout.objects import build_object
from verl_rollout.placing import Places
from verl_rollout.remote_balancer import RemoteBalancer
from verl_rollout.replica.proxy import ReplicaProxy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.events import EventSink
    from verl_contracts.failures import FailureRecord
    from verl_contracts.rollout import ChecksSettings, LLMServerManager, Replica, RolloutSettings
    from verl_contracts.runtime import ActorRef, DeviceGrant, Runtime
    from verl_rollout.placing import Place

__all__ = ["ReplicaManager", "ReplicaManagerConfig"]

_log = logging.getLogger(__name__)

_OPTIONS_KEY = "actor_rollout_ref.rollout.llm_server_manager_options"
_CLOSE_LIMIT_S = 30.0
_ASK_LIMIT_S = 5.0
"""Longest to wait for an answer of a replica that may be dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaManagerConfig:
    """Options of `ReplicaManager`."""

    queue_factor: float = 2.0
    """Leases per sequence that a replica decodes at once. Above 1 some requests wait inside, so that no slot idles."""
    max_attempts: int = 64
    """Attempts of one resumable request, the first one included."""
    cpus_per_device: float = 1.0
    """CPUs of a device of this manager's own pool."""
    gpus_per_device: float = 0.0
    """GPUs of a device of this manager's own pool."""

    def __post_init__(self) -> None:
        if self.queue_factor < 1.0:
            raise ValueError(f"queue_factor must be at least 1, or slots stay empty; got {self.queue_factor}")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    proxy: ReplicaProxy
    place: Place
    url: str | None
    """Where it answers the OpenAI protocol, if it does."""


class _LoggedFailures:
    """The failure sink of the driver's own client: the driver is who would be told."""

    def report(self, record: FailureRecord, /) -> None:
        """Log it."""
        _log.warning("%s", record)


class ReplicaManager:
    """The default `LLMServerManager`: one actor per replica, and one that balances."""

    Config: ClassVar[type] = ReplicaManagerConfig

    def __init__(
        self,
        settings: RolloutSettings,
        *,
        config: ReplicaManagerConfig,
        runtime: Runtime,
        start_rank: int,
        events: EventSink,
        balancer: ActorRef,
        places: Places,
    ) -> None:
        self._settings = settings
        self._places = places
        self._config = config
        self._runtime = runtime
        self._events = events
        self._next_rank = start_rank
        self._balancer_actor = balancer
        self._balancer = RemoteBalancer(caller=runtime, clock=runtime.clock, actor=balancer)
        self._held: dict[str, _Held] = {}
        self._closed = False

    @classmethod
    def check(cls, settings: RolloutSettings, /) -> None:
        """Refuse an engine that is not there, or that does not take its options or says itself that it cannot serve.

        The embedded one without options is imported by the replicas only, since it brings torch.
        """
        if settings.engine == ENGINE.default and not settings.engine_options and settings.engine in available(ENGINE):
            return
        engine = load_plugin(ENGINE, settings.engine, key=ENGINE_KEY)
        if isinstance(inspect.getattr_static(engine, "check", None), classmethod):
            cast("type[ChecksSettings]", engine).check(settings)  # which knows more to say of an option than its type
        build_config(engine.Config, settings.engine_options, key=ENGINE_OPTIONS_KEY)

    @classmethod
    async def create(
        cls,
        settings: RolloutSettings,
        /,
        *,
        runtime: Runtime,
        grant: DeviceGrant | None,
        start_rank: int | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        """Start the balancer and the replicas, or nothing."""
        config = build_config(ReplicaManagerConfig, settings.options, key=_OPTIONS_KEY)
        cls.check(settings)
        places = Places(
            runtime=runtime,
            devices_per_replica=settings.devices_per_replica,
            device=Bundle(cpus=config.cpus_per_device, gpus=config.gpus_per_device),
        )
        count = settings.num_replicas if grant is None else places.use(grant)
        rank = 0 if start_rank is None else start_rank
        target = ObjectSpec(
            path="verl_rollout.remote_balancer:BalancerActor",
            # No client holds a lease for longer than one request may take.
            arguments={"lease_limit_s": settings.request_limit_s + _CLOSE_LIMIT_S},
        )
        spec = ActorSpec(role=f"{settings.role}-balancer", rank=rank, target=target)
        balancer = await runtime.spawn(spec, deadline=deadline)
        manager = cls(
            settings,
            config=config,
            runtime=runtime,
            start_rank=rank,
            events=events,
            balancer=balancer,
            places=places,
        )
        try:
            await manager.add(count, deadline=deadline)
        except BaseException:
            await manager.close(deadline=Deadline.after(runtime.clock, _CLOSE_LIMIT_S))
            raise
        return manager

    def replicas(self) -> Sequence[Replica]:
        """Return the replicas in order of rank."""
        return tuple(held.proxy for held in self._held.values())

    def client(self) -> LLMClient:
        """Return a client for the driver."""
        context = ActorContext(
            run_id=self._runtime.run_id,
            role="driver",
            rank=0,
            caller=self._runtime,
            clock=self._runtime.clock,
            failures=_LoggedFailures(),
        )
        return build_object(self.client_spec(), LLMClient, context=context, name="LLM client")

    def client_spec(self) -> ObjectSpec:
        """Return how to build a client that reaches all replicas, those added later included."""
        arguments: dict[str, object] = {
            "balancer": self._balancer_actor,
            "replicas": tuple(held.proxy.address for held in self._held.values()),
            "request_limit_s": self._settings.request_limit_s,
        }
        if not self._settings.resumable:
            return ObjectSpec(path="verl_rollout.client:BalancedClient", arguments=arguments)
        arguments["max_attempts"] = self._config.max_attempts
        return ObjectSpec(path="verl_rollout.client:ResumableClient", arguments=arguments)

    def addresses(self) -> Sequence[str]:
        """Return the base URLs of the replicas that claim `OPENAI`; the others are called as actors only.

        The key for each is in the replica's `openai_endpoint`.
        """
        return tuple(held.url for held in self._held.values() if held.url is not None)

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[Replica]:
        """Start further replicas, where others left or on a pool of their own. They are not admitted yet."""
        name = f"{self._settings.role}-{self._next_rank}"
        places = await self._places.take(count, name=name, deadline=deadline)
        return await self._start(places, deadline)

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        """Let these replicas serve."""
        capacities = {name: int(self._find(name).proxy.capacity * self._config.queue_factor) for name in replica_ids}
        await asyncio.gather(*(self._balancer.add(name, capacity=capacity) for name, capacity in capacities.items()))

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        """Let these replicas serve no more. What they run they finish; what they can run no longer is cut."""
        for replica_id in replica_ids:
            replica = self._find(replica_id).proxy
            await self._balancer.remove(replica_id)
            limit = Deadline.after(self._runtime.clock, _ASK_LIMIT_S)
            try:
                if (await replica.status(deadline=limit)).state not in (SERVING, DEAD):
                    await replica.abort(None, deadline=limit)
            except (ActorFailed, WaitTimeout) as exc:
                _log.warning("replica %s is excluded and does not answer: %s", replica_id, exc)

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        """Drain and stop these replicas; a dead one is not drained."""
        held = [self._find(replica_id) for replica_id in replica_ids]
        async with asyncio.TaskGroup() as group:
            for each in held:
                group.create_task(self._remove(each, deadline))

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the replicas and the balancer, and give back the pools that were placed here."""
        if self._closed:
            return
        self._closed = True
        stops = [self._stop(held, deadline) for held in self._held.values()]
        stops.append(self._runtime.kill(self._balancer_actor, deadline=deadline))
        errors = [e for e in await asyncio.gather(*stops, return_exceptions=True) if e is not None]
        if errors:
            raise errors[0]

    async def _start(self, places: Sequence[Place], deadline: Deadline) -> Sequence[Replica]:
        """Start one replica per place, or none."""
        ranks = range(self._next_rank, self._next_rank + len(places))
        self._next_rank += len(places)
        spawns = [
            asyncio.create_task(self._spawn(rank, place, deadline)) for rank, place in zip(ranks, places, strict=True)
        ]
        try:
            started = await asyncio.gather(*spawns)  # wait: each spawn has the deadline
            for held in started:
                await self._balancer.register(held.proxy.address)
        except BaseException:
            for spawn in spawns:
                spawn.cancel()
            await asyncio.gather(*spawns, return_exceptions=True)  # wait: all were cancelled
            limit = Deadline.after(self._runtime.clock, _CLOSE_LIMIT_S)
            for spawn, place in zip(spawns, places, strict=True):
                if not spawn.cancelled() and spawn.exception() is None:
                    await self._stop(spawn.result(), limit)
                else:
                    await self._places.leave(place)
            raise
        for held in started:
            self._held[held.proxy.replica_id] = held
            self._events.emit("replica.started", {"replica": held.proxy.replica_id})
        return tuple(held.proxy for held in started)

    async def _spawn(self, rank: int, place: Place, deadline: Deadline) -> _Held:
        replica_id = f"{self._settings.role}-{rank}"
        spec = ActorSpec(
            role=self._settings.role,
            rank=rank,
            target=ObjectSpec(
                path="verl_rollout.replica.actor:ReplicaActor",
                arguments={"settings": self._settings, "replica_id": replica_id},
            ),
            grant=place.grant,
            bundle=place.bundle,
        )
        actor = await self._runtime.spawn(spec, deadline=deadline)
        try:
            claimed = await self._runtime.call(actor, "capabilities", {}, deadline=deadline)
            address = ReplicaAddress(
                replica=replica_id,
                actor=actor,
                capacity=self._settings.max_num_seqs,
                capabilities=answer(claimed, frozenset, method="ReplicaActor.capabilities"),
            )
            proxy = ReplicaProxy(caller=self._runtime, address=address)
            listens = OPENAI in proxy.capabilities
            url = (await proxy.openai_endpoint(deadline=deadline)).base_url if listens else None
        except BaseException:
            await self._runtime.kill(actor, deadline=Deadline.after(self._runtime.clock, _CLOSE_LIMIT_S))
            raise
        return _Held(proxy=proxy, place=place, url=url)

    async def _remove(self, held: _Held, deadline: Deadline) -> None:
        replica = held.proxy
        clock = self._runtime.clock
        try:
            alive = (await replica.status(deadline=deadline.within(clock, _ASK_LIMIT_S))).state != DEAD
        except (ActorFailed, WaitTimeout):
            alive = False
        if alive:
            try:
                await self._balancer.drain(
                    replica.replica_id, deadline=deadline.within(clock, deadline.remaining(clock) / 2)
                )
            except WaitTimeout as exc:
                _log.warning("replica %s is stopped before it is drained: %s", replica.replica_id, exc)
        await self._balancer.remove(replica.replica_id)
        await self._balancer.unregister(replica.replica_id)
        del self._held[replica.replica_id]
        await self._stop(held, deadline)
        self._events.emit("replica.removed", {"replica": replica.replica_id})

    async def _stop(self, held: _Held, deadline: Deadline) -> None:
        try:
            await self._runtime.kill(held.proxy.address.actor, deadline=deadline)
        finally:
            await self._places.leave(held.place)

    def _find(self, replica_id: str) -> _Held:
        held = self._held.get(replica_id)
        if held is None:
            raise StateError(f"replica {replica_id} is not here; there are: {', '.join(self._held) or 'none'}")
        return held


if TYPE_CHECKING:

    def _is_manager(x: ReplicaManager) -> LLMServerManager:
        return x

    def _checks_settings(x: type[ReplicaManager]) -> type[ChecksSettings]:
        return x
