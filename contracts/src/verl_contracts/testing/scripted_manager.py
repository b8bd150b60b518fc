"""An `LLMServerManager` over scripted replicas in this process: rollout for tests of trainers, in virtual time.

Routing is the simplest that is right: the least busy of the admitted replicas, and another one when it dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.errors import ActorFailed, NoHealthyReplica
from verl_contracts.plugins.config import build_config
from verl_contracts.runtime import ObjectSpec
from verl_contracts.testing.scripted import Script, ScriptedReplica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import LLMClient, LLMServerManager, RolloutSettings
    from verl_contracts.runtime import ActorContext, DeviceGrant, Runtime
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest

__all__ = ["ScriptedManager", "ScriptedManagerConfig", "ScriptedRouter"]

_ROUTERS: dict[str, ScriptedRouter] = {}
"""Role and run → router, so that a client can be built from a spec anywhere in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedManagerConfig:
    """Options of `ScriptedManager`."""

    seconds_per_token: float = 0.01
    capacity: int = 8


class ScriptedRouter:
    """The client of this process."""

    def __init__(self) -> None:
        self.replicas: dict[str, ScriptedReplica] = {}
        self.admitted: set[str] = set()
        self._load: dict[str, int] = {}

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Ask the least busy admitted replica; another one when it is dead."""
        while serving := sorted(self.admitted & self.replicas.keys()):
            name = min(serving, key=lambda replica: self._load.get(replica, 0))
            self._load[name] = self._load.get(name, 0) + 1
            try:
                return await self.replicas[name].generate(request, deadline=deadline)
            except ActorFailed:
                self.admitted.discard(name)
            finally:
                self._load[name] -= 1
        raise NoHealthyReplica(f"none of {sorted(self.replicas)} is admitted and alive")


class _RouterClient:
    """What a client spec builds: the router of its run, looked up in this process."""

    def __init__(self, *, context: ActorContext, router: str) -> None:
        del context
        self._router = _ROUTERS[router]

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        return await self._router.generate(request, deadline=deadline)


class ScriptedManager:
    """Scripted replicas, admitted and excluded as told."""

    Config: ClassVar[type] = ScriptedManagerConfig

    def __init__(self, settings: RolloutSettings, *, runtime: Runtime, start_rank: int) -> None:
        self._config = build_config(ScriptedManagerConfig, settings.options, key="options")
        self._clock = runtime.clock
        self._role = settings.role
        self._next_rank = start_rank
        self._key = f"{runtime.run_id}/{settings.role}/{start_rank}"
        self._router = _ROUTERS[self._key] = ScriptedRouter()

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
        """Make the replicas; devices are not needed."""
        manager = cls(settings, runtime=runtime, start_rank=start_rank or 0)
        count = settings.num_replicas if grant is None else len(grant.bundles) // settings.devices_per_replica
        await manager.add(count, deadline=deadline)
        return manager

    def replicas(self) -> Sequence[ScriptedReplica]:
        """Return the replicas."""
        return tuple(self._router.replicas.values())

    def client(self) -> LLMClient:
        """Return the router."""
        return self._router

    def client_spec(self) -> ObjectSpec:
        """Return a spec that works in this process."""
        return ObjectSpec(path=f"{__name__}:_RouterClient", arguments={"router": self._key})

    def addresses(self) -> Sequence[str]:
        """Return none."""
        return ()

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[ScriptedReplica]:
        """Make further replicas."""
        made: list[ScriptedReplica] = []
        for _ in range(count):
            name = f"{self._role}-{self._next_rank}"
            self._next_rank += 1
            script = Script(seconds_per_token=self._config.seconds_per_token)
            self._router.replicas[name] = ScriptedReplica(
                name, clock=self._clock, capacity=self._config.capacity, script=script
            )
            made.append(self._router.replicas[name])
        return made

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        """Let them serve."""
        self._router.admitted |= set(replica_ids) & self._router.replicas.keys()

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        """Let them serve no more."""
        self._router.admitted -= set(replica_ids)

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        """Exclude them, let them finish, and forget them."""
        await self.exclude(replica_ids)
        for name in replica_ids:
            replica = self._router.replicas.get(name)
            if replica is not None:
                await replica.pause("wait", deadline=deadline)
                del self._router.replicas[name]
                replica.die("removed")

    async def close(self, *, deadline: Deadline) -> None:
        """Stop all replicas."""
        for replica in self._router.replicas.values():
            replica.die("closed")
        self._router.replicas.clear()
        _ROUTERS.pop(self._key, None)


if TYPE_CHECKING:

    def _is_manager(x: ScriptedManager) -> LLMServerManager:
        return x

    def _is_router(x: ScriptedRouter) -> LLMClient:
        return x

    def _is_client(x: _RouterClient) -> LLMClient:
        return x
