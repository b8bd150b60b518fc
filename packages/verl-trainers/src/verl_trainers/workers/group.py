"""All ranks of the policy as the driver sees them: spawned, called together, and stopped together.

Owns that ranks do the same thing at the same time. A rank that fails ends the call on all of them with its own error.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Self, TypeVar, cast

from verl_contracts.clock import Deadline
from verl_contracts.errors import ConfigError, StateError
from verl_contracts.runtime import ActorSpec, ObjectSpec
from verl_contracts.training import StepResult
from verl_contracts.waits import bounded
from verl_contracts.weights import EndpointInfo, Manifest, TransferReport
from verl_trainers.workers.algorithm import build_estimator, build_policy_loss
from verl_trainers.workers.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.runtime import ActorRef, Bundle, DeviceGrant, Runtime
    from verl_contracts.samples import Trajectory
    from verl_contracts.training import PolicyWorkers, StepContext, TrainBatch
    from verl_contracts.weights import Plan, WeightSenderHost
    from verl_trainers.config.schema import RunConfig

__all__ = ["PolicySenderHost", "PolicyWorkerGroup", "engine_settings"]

T = TypeVar("T")

ROLE = "policy"
"""Role of the ranks' actors."""


def engine_settings(config: RunConfig, *, total_steps: int, rank: int, bundles: Sequence[Bundle]) -> EngineSettings:
    """Return what `rank` is told. Raises `ConfigError` for a device that is not there."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    bundle = bundles[rank]
    if config.trainer.device == "cuda" and bundle.gpus <= 0:
        raise ConfigError(f"trainer.device = 'cuda', and bundle {rank} of the trainer has no GPU")
    return EngineSettings(
        model=config.actor_rollout_ref.model,
        total_steps=total_steps,
        actor=actor,
        ref=config.actor_rollout_ref.ref,
        algorithm=config.algorithm,
        temperature=rollout.temperature,
        wire_dtype=rollout.dtype,
        rank=rank,
        world_size=len(bundles),
        device="cuda" if bundle.gpus > 0 and config.trainer.device != "cpu" else "cpu",
        num_threads=1 if config.deterministic else max(1, int(bundle.cpus)),
    )


class _Ranks:
    """Calls on all ranks at once."""

    def __init__(self, runtime: Runtime, actors: Sequence[ActorRef]) -> None:
        self.runtime = runtime
        self.actors = tuple(actors)

    async def all(self, method: str, arguments: Mapping[str, object], deadline: Deadline) -> list[object]:
        """Call every rank, and return their results in order of rank. The first error ends it."""
        calls = [
            asyncio.ensure_future(self.runtime.call(actor, method, arguments, deadline=deadline))
            for actor in self.actors
        ]

        def waiting() -> str:  # at the limit the calls have been cancelled: those are the ones that did not answer
            pairs = zip(self.actors, calls, strict=True)
            return ", ".join(actor.name for actor, call in pairs if not call.done() or call.cancelled())

        try:
            return await bounded(
                asyncio.gather(*calls),
                subject=f"{ROLE}.{method}",
                holder=waiting,
                deadline=deadline,
                clock=self.runtime.clock,
            )
        finally:
            for call in calls:
                call.cancel()


class PolicyWorkerGroup:
    """N ranks on the N bundles of a grant. `create` → use → `close`."""

    def __init__(self, ranks: _Ranks) -> None:
        self._ranks = ranks
        self._sender_host = PolicySenderHost(ranks)
        self._closed = False

    @classmethod
    async def create(
        cls, *, runtime: Runtime, grant: DeviceGrant, config: RunConfig, total_steps: int, deadline: Deadline
    ) -> Self:
        """Spawn one rank per bundle and load the policy. Leaves nothing behind when it raises."""
        build_estimator(config.algorithm)  # refused here, before anything is spawned
        build_policy_loss(config.actor_rollout_ref.actor)
        size = len(grant.bundles)
        specs: list[ActorSpec] = []
        for rank in range(size):
            settings = engine_settings(config, total_steps=total_steps, rank=rank, bundles=grant.bundles)
            arguments = {
                "settings": settings,
                "weight_backend": config.actor_rollout_ref.rollout.checkpoint_engine.backend,
                "collective_limit_s": config.trainer.step_limit_s,
            }
            specs.append(
                ActorSpec(
                    role=ROLE,
                    rank=rank,
                    target=ObjectSpec(path="verl_trainers.workers.actor:PolicyActor", arguments=arguments),
                    grant=grant,
                    bundle=rank,
                    env={"OMP_NUM_THREADS": str(settings.num_threads)},
                )
            )
        spawned = await asyncio.gather(
            *(runtime.spawn(spec, deadline=deadline) for spec in specs), return_exceptions=True
        )
        group = cls(_Ranks(runtime, [actor for actor in spawned if not isinstance(actor, BaseException)]))
        try:
            for outcome in spawned:
                if isinstance(outcome, BaseException):
                    raise outcome
            await group._start(deadline)
        except BaseException:
            await group.close(deadline=Deadline.after(runtime.clock, 10.0))
            raise
        return group

    @property
    def sender_host(self) -> PolicySenderHost:
        """The face of the ranks' weight senders."""
        return self._sender_host

    async def update(self, batch: TrainBatch, context: StepContext, /, *, deadline: Deadline) -> StepResult:
        """Do one step on every rank. Metrics are those of rank 0, which hold for all; seconds are the slowest's."""
        results = [
            _checked(result, StepResult)
            for result in await self._ranks.all("update", {"batch": batch, "step": context}, deadline)
        ]
        done = {(result.version, result.rows, result.updates) for result in results}
        if len(done) != 1 or results[0].rows != len(batch.rows):
            raise StateError(
                f"step {context.step}: all ranks must train on the same {len(batch.rows)} rows; "
                f"(version, rows, updates) by rank: {[(r.version, r.rows, r.updates) for r in results]}"
            )
        parts = dict.fromkeys(part for result in results for part in result.seconds)
        slowest = {part: max(result.seconds.get(part, 0.0) for result in results) for part in parts}
        return dataclasses.replace(results[0], seconds=slowest)

    async def log_probs(self, trajectories: Sequence[Trajectory], /, *, deadline: Deadline) -> list[list[float]]:
        """Return per trajectory [T] log-probs under the present policy, in nats; position 0 is 0."""
        found = await self._ranks.all("log_probs", {"trajectories": tuple(trajectories)}, deadline)
        return cast("list[list[float]]", _checked(found[0], list))

    async def perturb(self, scale: float, /, *, deadline: Deadline) -> None:
        """Change each weight by up to `scale` of itself, on every rank."""
        await self._ranks.all("perturb", {"scale": scale}, deadline)

    async def save(self, path: str, /, *, deadline: Deadline) -> None:
        """Write the policy as a Hugging Face folder; complete or absent."""
        await self._ranks.all("save", {"path": path}, deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the ranks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(self._ranks.runtime.kill(actor, deadline=deadline) for actor in self._ranks.actors))

    async def _start(self, deadline: Deadline) -> None:
        rendezvous: object = None
        if len(self._ranks.actors) > 1:
            first = self._ranks.actors[0]
            rendezvous = await self._ranks.runtime.call(first, "open_rendezvous", {}, deadline=deadline)
        await self._ranks.all("start", {"rendezvous": rendezvous}, deadline)


class PolicySenderHost:
    """The ranks' weight senders as one. Rank 0 sends; all gather."""

    def __init__(self, ranks: _Ranks) -> None:
        self._ranks = ranks

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        """Prepare each rank. Raises `StateError` when they hold different tensors."""
        arguments = {"version": version, "session": session}
        answers = [_checked(pair, tuple) for pair in await self._ranks.all("sender_prepare", arguments, deadline)]
        manifests = [_checked(manifest, Manifest) for manifest, _ in answers]
        if any(manifest != manifests[0] for manifest in manifests):
            raise StateError(f"the ranks of the policy hold different tensors: {[len(m.tensors) for m in manifests]}")
        return manifests[0], [_checked(endpoint, EndpointInfo) for _, endpoint in answers if endpoint is not None]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Send everything; the one report is rank 0's."""
        reports = await self._ranks.all("sender_transfer", {"plan": plan}, deadline)
        return [_checked(report, TransferReport) for report in reports if report is not None]

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer that is under way. Idempotent."""
        await self._ranks.all("sender_abort", {"reason": reason}, deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` made. Idempotent."""
        await self._ranks.all("sender_close", {}, deadline)


def _checked(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise StateError(f"a policy rank answered with {type(value).__name__}, not {kind.__name__}")
    return value


if TYPE_CHECKING:

    def _is_policy_workers(x: PolicyWorkerGroup) -> PolicyWorkers:
        return x

    def _is_sender_host(x: PolicySenderHost) -> WeightSenderHost:
        return x
