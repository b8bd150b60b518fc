"""Owns the agent-loop workers: spreads groups over them, and survives the death of one.

Refuses to hold groups back: how many are under way is the driver's business. A worker that dies takes no group with
it: its groups are played again elsewhere, and it is started again once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, ConfigError, StateError
from verl_contracts.plugins import build_config, families, load_plugin
from verl_contracts.runtime import ActorSpec, ObjectSpec
from verl_contracts.samples import GroupResult
from verl_contracts.waits import bounded
from verl_rollout.addresses import answer

if TYPE_CHECKING:
    from verl_contracts.agents import AgentLoopManager, AgentSettings
    from verl_contracts.events import EventSink
    from verl_contracts.failures import FailureRecord
    from verl_contracts.runtime import ActorRef, Runtime
    from verl_contracts.samples import GroupRequest

__all__ = ["AgentManagerConfig", "WorkerAgentLoopManager"]

_log = logging.getLogger(__name__)

_OPTIONS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_options"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentManagerConfig:
    """Options of `WorkerAgentLoopManager`."""

    role: str = "agent"
    """Part of every worker's name."""
    restarts: int = 1
    """How often each worker is started again after it died."""
    group_attempts: int = 2
    """Workers that one group may be given to: a group that kills its workers must not kill them all."""
    spawn_limit_s: float = 120.0
    """Longest that starting a worker again may take."""

    def __post_init__(self) -> None:
        if self.group_attempts < 1:
            raise ValueError(f"group_attempts must be at least 1, got {self.group_attempts}")


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """One worker's place, over its restarts."""

    rank: int
    worker: ActorRef | None
    outstanding: int = 0
    restarts: int = 0
    death: FailureRecord | None = None
    restarting: asyncio.Task[None] | None = None


class WorkerAgentLoopManager:
    """Plays each group on the worker with the fewest groups under way."""

    Config: ClassVar[type] = AgentManagerConfig

    def __init__(
        self, *, config: AgentManagerConfig, runtime: Runtime, target: ObjectSpec, events: EventSink, num_workers: int
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._target = target
        self._events = events
        self._slots = [_Slot(rank=rank, worker=None) for rank in range(num_workers)]
        self._closed = False

    @classmethod
    async def create(
        cls,
        settings: AgentSettings,
        /,
        *,
        runtime: Runtime,
        client: ObjectSpec,
        reward: ObjectSpec | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        """Start all workers, or none: what was started is stopped when one cannot start."""
        if settings.num_workers < 1:
            raise ConfigError(
                f"actor_rollout_ref.rollout.agent.num_workers must be at least 1, got {settings.num_workers}"
            )
        config = build_config(AgentManagerConfig, settings.options, key=_OPTIONS_KEY)
        load_plugin(families.AGENT_LOOP, settings.loop, key=families.AGENT_LOOP.key)
        target = ObjectSpec(
            path="verl_rollout.agents.worker:AgentWorkerActor",
            arguments={
                "client": client,
                "reward": reward,
                "loop": settings.loop,
                "loop_options": dict(settings.loop_options),
                "sample_limit_s": settings.sample_limit_s,
            },
        )
        manager = cls(config=config, runtime=runtime, target=target, events=events, num_workers=settings.num_workers)
        try:
            async with asyncio.TaskGroup() as group:
                for slot in manager._slots:
                    group.create_task(manager._start(slot, deadline))
        except BaseException as exc:
            await manager.close(deadline=Deadline.after(runtime.clock, config.spawn_limit_s))
            if isinstance(exc, BaseExceptionGroup):
                raise exc.exceptions[0] from None
            raise
        return manager

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        """Play a group; on another worker when the first one dies."""
        attempts = self._config.group_attempts
        while True:
            slot, worker = await self._choose(deadline)
            attempts -= 1
            slot.outstanding += 1
            try:
                result = await self._runtime.call(worker, "run_group", {"request": request}, deadline=deadline)
                return answer(result, GroupResult, method="AgentWorkerActor.run_group")
            except ActorFailed as exc:
                if (exc.record.role, exc.record.rank) != (worker.role, worker.rank):
                    raise  # something that the worker depends on, for example the balancer
                self._died(slot, worker, exc.record)
                if attempts == 0:
                    raise
            finally:
                slot.outstanding -= 1

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the workers."""
        self._closed = True
        for slot in self._slots:
            if slot.restarting is not None:
                slot.restarting.cancel()
            worker, slot.worker = slot.worker, None
            if worker is not None:
                await self._runtime.kill(worker, deadline=deadline)

    async def _choose(self, deadline: Deadline) -> tuple[_Slot, ActorRef]:
        """Return a live worker, waiting for one that is being started when there is no other."""
        while not self._closed:
            live = [(slot.outstanding, slot.rank, slot, slot.worker) for slot in self._slots if slot.worker is not None]
            if live:
                _, _, slot, worker = min(live, key=lambda row: row[:2])
                return slot, worker
            starting = [slot.restarting for slot in self._slots if slot.restarting is not None]
            if not starting:
                break
            await bounded(
                asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED),
                subject="an agent-loop worker",
                holder=", ".join(f"{self._config.role}[{slot.rank}]" for slot in self._slots),
                deadline=deadline,
                clock=self._runtime.clock,
            )
        if self._closed:
            raise StateError("the agent-loop manager is closed")
        death = next((slot.death for slot in self._slots if slot.death is not None), None)
        raise ActorFailed(death) if death is not None else StateError("no agent-loop worker was started")

    def _died(self, slot: _Slot, worker: ActorRef, record: FailureRecord) -> None:
        """Note a worker's death, once, and start it again while it may be."""
        if slot.worker is not worker:
            return
        slot.worker = None
        slot.death = record
        again = slot.restarts < self._config.restarts and not self._closed
        _log.warning("agent-loop worker %d died%s: %s", slot.rank, ", starting it again" if again else "", record)
        self._events.emit("agent.worker_died", {"rank": slot.rank, "cause": record.cause, "restarted": again})
        if again:
            slot.restarts += 1
            slot.restarting = asyncio.create_task(self._restart(slot))

    async def _restart(self, slot: _Slot) -> None:
        try:
            await self._start(slot, Deadline.after(self._runtime.clock, self._config.spawn_limit_s))
        except Exception as exc:
            # Whoever waits for this worker finds none left and raises the first death, which is the cause.
            _log.warning("agent-loop worker %d could not be started again: %s", slot.rank, exc)
        finally:
            slot.restarting = None

    async def _start(self, slot: _Slot, deadline: Deadline) -> None:
        spec = ActorSpec(role=self._config.role, rank=slot.rank, target=self._target)
        slot.worker = await self._runtime.spawn(spec, deadline=deadline)


if TYPE_CHECKING:

    def _is_manager(x: WorkerAgentLoopManager) -> AgentLoopManager:
        return x
