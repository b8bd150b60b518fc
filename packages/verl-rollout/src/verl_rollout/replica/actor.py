"""The process of one replica: an engine, called by method name, and the report of its death.

Refuses to know engines, transports and schedules. The failure that it prevents is a dead engine that looks like one bad
request after another: its first error is reported once, as the failure of this actor, and named by every later call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from verl_contracts.errors import ActorFailed, StateError
from verl_contracts.failures import FailureRecord
from verl_contracts.plugins import load_plugin
from verl_contracts.rollout import DEAD, LORA, OPENAI
from verl_contracts.tokens import Completion
from verl_rollout.engine.receiving import receiver_class
from verl_rollout.engine_family import ENGINE, ENGINE_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import (
        Capability,
        OpenAIEndpoint,
        PauseMode,
        ReplicaStatus,
        RolloutSettings,
        SupportsLora,
        SupportsOpenAI,
    )
    from verl_contracts.runtime import ActorContext
    from verl_contracts.tokens import AbortedCompletion, GenerationRequest
    from verl_contracts.weights import EndpointInfo, Manifest, Plan, TransferReport

__all__ = ["ReplicaActor"]

_log = logging.getLogger(__name__)


class ReplicaActor:
    """Hosts one engine under the name `replica_id`. Called through `ReplicaProxy`."""

    def __init__(self, *, context: ActorContext, settings: RolloutSettings, replica_id: str) -> None:
        self._context = context
        self._replica_id = replica_id
        receiver_class(settings.weight_backend, role=replica_id)  # one that cannot be loaded is refused here
        engine_class = load_plugin(ENGINE, settings.engine, key=ENGINE_KEY, role=replica_id)
        self._engine = engine_class.create(settings, replica_id=replica_id, rank=context.rank, clock=context.clock)
        self._death: FailureRecord | None = None

    async def capabilities(self) -> frozenset[Capability]:
        """Return what the engine can do."""
        return self._engine.capabilities

    async def generate(self, request: GenerationRequest, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence. Raises `ActorFailed` when the engine is dead or answers nothing."""
        try:
            reply = await self._engine.generate(request, deadline=deadline)
        except Exception as exc:
            if self._engine.status().state == DEAD:
                raise ActorFailed(self._died(exc)) from exc
            raise
        if isinstance(reply, Completion) and not reply.token_ids:
            raise ActorFailed(self._record(RuntimeError(f"an empty completion for request {request.request_id}")))
        return reply

    async def abort(self, request_ids: Sequence[str] | None, reason: str) -> None:
        """Cut these requests, or all."""
        await self._engine.abort(request_ids, reason=reason)

    async def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Return once nothing is decoded."""
        await self._engine.pause(mode, deadline=deadline)

    async def resume(self) -> None:
        """Decode again."""
        await self._engine.resume()

    async def status(self) -> ReplicaStatus:
        """Return the engine's status, at once."""
        return self._engine.status()

    async def sleep(self) -> None:
        """Free the device memory."""
        await self._engine.sleep()

    async def wake(self) -> None:
        """Take the device memory again."""
        await self._engine.wake()

    async def openai_endpoint(self, deadline: Deadline) -> OpenAIEndpoint:
        """Return where the engine answers the OpenAI protocol."""
        if OPENAI not in self._engine.capabilities:
            raise StateError(
                f"replica {self._replica_id} does not answer the OpenAI protocol: its engine claims no such"
            )
        return await cast("SupportsOpenAI", self._engine).openai_endpoint(deadline=deadline)

    async def load_adapter(self, name: str, folder: str, deadline: Deadline) -> None:
        """Load a LoRA adapter from a folder of this process's machine."""
        await self._adapting().load_adapter(name, folder=folder, deadline=deadline)

    async def unload_adapter(self, name: str, deadline: Deadline) -> None:
        """Forget a LoRA adapter when nothing runs with it."""
        await self._adapting().unload_adapter(name, deadline=deadline)

    async def adapters(self, deadline: Deadline) -> tuple[str, ...]:
        """Return the names of the LoRA adapters."""
        return tuple(await self._adapting().adapters(deadline=deadline))

    async def receiver_prepare(self, manifest: Manifest, session: str, deadline: Deadline) -> tuple[EndpointInfo, ...]:
        """Create what the sender needs in order to connect, on every rank of the engine."""
        return tuple(await self._engine.receiver_host.prepare(manifest, session=session, deadline=deadline))

    async def receiver_transfer(self, plan: Plan, deadline: Deadline) -> tuple[TransferReport, ...]:
        """Load the whole stream into the engine, which is invalid from here until `receiver_commit`."""
        return tuple(await self._engine.receiver_host.transfer(plan, deadline=deadline))

    async def receiver_commit(self, version: int, keep_cache: bool, deadline: Deadline) -> None:
        """Make what was loaded the engine's `version`."""
        await self._engine.receiver_host.commit(version, keep_cache=keep_cache, deadline=deadline)

    async def receiver_abort(self, reason: str, deadline: Deadline) -> None:
        """Make a transfer that is under way raise."""
        await self._engine.receiver_host.abort(reason, deadline=deadline)

    async def receiver_close(self, deadline: Deadline) -> None:
        """Remove what `receiver_prepare` created."""
        await self._engine.receiver_host.close(deadline=deadline)

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()

    def _adapting(self) -> SupportsLora:
        if LORA not in self._engine.capabilities:
            raise StateError(f"replica {self._replica_id} takes no adapters: its engine does not claim {LORA!r}")
        return cast("SupportsLora", self._engine)

    def _died(self, exc: Exception) -> FailureRecord:
        """Report the engine's death, once; later calls name the same first cause."""
        if self._death is None:
            self._death = self._record(exc)
            self._context.failures.report(self._death)
            _log.error("the engine of %s is dead: %s", self._replica_id, self._death.cause)
        return self._death

    def _record(self, exc: Exception) -> FailureRecord:
        return FailureRecord.from_exception(exc, role=self._context.role, rank=self._context.rank)
