"""The process of one replica: an engine, and the receiver that fills it.

Owns the order of a weight update on the engine's side; refuses to know transports and schedules. The failure that it
prevents is a replica that serves weights of which nobody knows whether they arrived: from the first byte of a
transfer until its commit the engine is invalid, whatever goes wrong in between.

`receiver_*` methods that block are plain, so that the runtime runs them on the compute thread; `receiver_abort`,
`status` and generation stay on the event loop and answer meanwhile.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from verl_contracts.errors import ActorFailed, StateError
from verl_contracts.failures import FailureRecord
from verl_contracts.plugins import build_plugin, families, load_plugin
from verl_contracts.rollout import DEAD
from verl_contracts.tokens import Completion
from verl_rollout.engine_family import ENGINE, ENGINE_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import PauseMode, ReplicaStatus, RolloutSettings
    from verl_contracts.runtime import ActorContext
    from verl_contracts.tokens import AbortedCompletion, GenerationRequest
    from verl_contracts.weights import EndpointInfo, Manifest, Plan, TransferReport, WeightReceiver

__all__ = ["ReplicaActor"]

_log = logging.getLogger(__name__)


class ReplicaActor:
    """Hosts one engine under the name `replica_id`. Called through `ReplicaProxy`."""

    def __init__(self, *, context: ActorContext, settings: RolloutSettings, replica_id: str) -> None:
        self._context = context
        self._replica_id = replica_id
        backend = load_plugin(
            families.WEIGHT_BACKEND, settings.weight_backend, key=families.WEIGHT_BACKEND.key, role=replica_id
        )
        self._receiver_class = backend.receiver_class
        self._receiver: WeightReceiver | None = None
        """Made for the first sync and kept for all: what it has mapped serves the next one too."""
        self._receiver_prepared = False
        engine_class = load_plugin(ENGINE, settings.engine, key=ENGINE_KEY, role=replica_id)
        self._engine = engine_class.create(settings, replica_id=replica_id, clock=context.clock)
        self._death: FailureRecord | None = None

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

    def receiver_prepare(self, manifest: Manifest, session: str) -> EndpointInfo:
        """Create what the sender needs in order to connect. A session left over from another sync is closed."""
        self.receiver_close()
        self._engine.check_manifest(manifest)
        if self._receiver is None:
            self._receiver = build_plugin(
                self._receiver_class,
                {},
                key=families.WEIGHT_BACKEND.key,
                arguments={"owner": self._replica_id, "clock": self._context.clock},
            )
        self._receiver_prepared = True
        return self._receiver.prepare(session=session, rank=0)

    def receiver_transfer(self, plan: Plan, deadline: Deadline) -> TransferReport:
        """Load the whole stream into the engine, which is invalid from here until `receiver_commit`."""
        if self._receiver is None or not self._receiver_prepared:
            raise StateError(f"{self._replica_id}: a transfer of {plan.session} was asked for, and nothing is prepared")
        self._engine.begin_update()
        return self._receiver.receive(plan, self._engine.target(), deadline=deadline)

    async def receiver_commit(self, version: int, keep_cache: bool) -> None:
        """Make what was loaded the engine's `version`."""
        await self._engine.commit(version, keep_cache=keep_cache)

    async def receiver_abort(self, reason: str) -> None:
        """Make a transfer that is under way raise."""
        if self._receiver is not None and self._receiver_prepared:
            self._receiver.abort(reason)

    def receiver_close(self) -> None:
        """Remove what `receiver_prepare` created."""
        if self._receiver is not None and self._receiver_prepared:
            self._receiver_prepared = False
            self._receiver.close()

    async def close(self) -> None:
        """Stop the engine and drop the receiver."""
        if self._receiver is not None:
            self._receiver.abort("the replica closes")
            self.receiver_close()
            self._receiver = None
        await self._engine.close()

    def _died(self, exc: Exception) -> FailureRecord:
        """Report the engine's death, once; later calls name the same first cause."""
        if self._death is None:
            self._death = self._record(exc)
            self._context.failures.report(self._death)
            _log.error("the engine of %s is dead: %s", self._replica_id, self._death.cause)
        return self._death

    def _record(self, exc: Exception) -> FailureRecord:
        return FailureRecord.from_exception(exc, role=self._context.role, rank=self._context.rank)
