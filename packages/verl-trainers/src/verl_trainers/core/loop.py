"""The training loop, written once for every mode: wait for a batch, train on it, move the weights, admit more.

It takes Protocols and data, and is the same code on virtual and on real time. What distinguishes modes is the schedule
and where the parts run, not this file.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from verl_contracts.clock import Deadline
from verl_contracts.errors import RunFailed
from verl_contracts.tracking import reduce_metrics
from verl_contracts.training import StepContext, TrainBatch, TrainRow
from verl_contracts.waits import bounded
from verl_contracts.weights import SyncReport
from verl_trainers.core.metrics import GroupMetrics, RunCounters, StepClock
from verl_trainers.core.mismatch import MismatchWatch
from verl_trainers.core.producer import GroupProducer
from verl_trainers.core.replica_metrics import ReplicaWatch
from verl_trainers.core.signal import SignalWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink
    from verl_contracts.failures import FailureRecord
    from verl_contracts.rollout import LLMServerManager
    from verl_contracts.samples import GroupResult
    from verl_contracts.tracking import Tracker
    from verl_contracts.training import (
        AdmissionPolicy,
        DataSource,
        ExperienceStore,
        PolicyWorkers,
        Schedule,
        StepResult,
    )
    from verl_contracts.weights import CheckpointEngineManager
    from verl_trainers.core.producer import GroupPlayer, GroupRules, Reject
    from verl_trainers.core.validation import ValidationReport, Validator

__all__ = ["LoopLimits", "LoopParts", "LoopReport", "TrainingLoop"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long after its deadline a part may answer; its own error, which knows more, should come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Longest that each kind of wait may take, in seconds."""

    wait_s: float = 1800.0
    """For a batch."""
    step_s: float = 1800.0
    """For a step on the policy workers."""
    sync_s: float = 600.0
    """For a weight sync, or for sleeping and waking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop works with. It starts and stops none of them."""

    admission: AdmissionPolicy
    store: ExperienceStore
    data: DataSource
    agents: GroupPlayer
    servers: LLMServerManager | None
    """None when there are no replicas, since nothing is generated."""
    checkpoint: CheckpointEngineManager | None
    """None when there are no replicas; then weights stay where they are made."""
    workers: PolicyWorkers
    clock: Clock
    events: EventSink
    trackers: Sequence[Tracker] = ()
    validator: Validator | None = None
    """None when there is nothing to validate on."""
    failures: AsyncIterator[FailureRecord] | None = None
    """The runtime's failure channel; None when nobody reports."""
    on_batch: Callable[[int, Sequence[GroupResult]], None] | None = None
    """Called with each step and its groups, for example to write samples down; None does nothing."""


@dataclass(slots=True)
class LoopReport:
    """What a run did."""

    steps: int = 0
    groups_trained: int = 0
    groups_dropped: int = 0
    final_version: int = 0
    max_staleness_seen: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean score of each step."""
    validations: list[ValidationReport] = field(default_factory=list)
    logprob_diffs: list[float] = field(default_factory=list)
    """Mean |rollout log-prob - trainer log-prob| of each step that measured it."""
    rows_trained: int = 0
    updates: int = 0
    """Optimizer steps made; fewer than steps when gradients were not finite."""
    steps_without_signal: int = 0
    """Steps in which every advantage was 0."""
    train_seconds: float = 0.0
    """From the first wait for a batch to the end of the last step."""
    rejects: list[Reject] = field(default_factory=list)


class TrainingLoop:
    """Runs from the first weight sync to the last step."""

    def __init__(
        self,
        *,
        parts: LoopParts,
        rules: GroupRules,
        schedule: Schedule,
        total_steps: int,
        batch_groups: int,
        limits: LoopLimits,
        test_freq: int = -1,
        val_before_train: bool = True,
        trains: bool = True,
        logprob_diff_limit: float = math.inf,
    ) -> None:
        """Start nothing yet. `test_freq` is in steps; -1 validates only before the first and after the last one.

        With `trains` False the workers make no update, or there is no step at all: the first weights are all there is.
        A mean difference of log-probs above `logprob_diff_limit`, in nats a token, is warned of once.
        """
        self._parts = parts
        self._rules = rules
        self._schedule = schedule
        self._total_steps = total_steps
        self._limits = limits
        self._test_freq = test_freq
        self._val_before_train = val_before_train
        self._trains = trains
        self._producer = GroupProducer(
            admission=parts.admission,
            store=parts.store,
            data=parts.data,
            agents=parts.agents,
            rules=rules,
            min_ratio_groups=2 * batch_groups,
            clock=parts.clock,
            events=parts.events,
        )
        self._signal = SignalWatch(n=rules.n)
        self._mismatch = MismatchWatch(limit=logprob_diff_limit)
        self._replicas = ReplicaWatch(parts.servers, clock=parts.clock)
        self._served = 0
        self._counters = RunCounters()
        self.report = LoopReport()
        """Grows as the run goes on; valid also after a failure."""

    async def run(self) -> LoopReport:
        """Train all steps. Raises RunFailed, or whatever a part raised; the producer is stopped in every case."""
        events = self._parts.events
        events.emit("run.begin", {"steps": self._total_steps, "max_staleness": self._schedule.max_staleness})
        watcher = asyncio.ensure_future(self._watch_failures())
        try:
            await self._sync(0)
            if self._val_before_train:
                await self._validate()
            self._replicas.ask()
            began = self._parts.clock.now()
            for step in range(1, self._total_steps + 1):
                await self._step(step)
                self.report.train_seconds = self._parts.clock.now() - began
                if self._test_freq > 0 and step % self._test_freq == 0 and step < self._total_steps:
                    await self._validate()
            if self._trains and self._served != self.report.final_version:
                await self._sync(self.report.final_version)
            if self._served not in [row.version for row in self.report.validations]:
                await self._validate()
            if self._trains and self.report.updates == 0:
                raise RunFailed(
                    f"the run made 0 updates in {self.report.steps} steps: each was skipped, because its loss or "
                    "gradient was not finite; look at the metrics actor/loss, actor/grad_norm and at the advantages"
                )
        finally:
            watcher.cancel()
            await self._producer.close()
            await self._replicas.close()
            self._signal.end()
            self.report.rejects = list(self._producer.rejects)
            self.report.groups_dropped = self._producer.counts["dropped"]
            events.emit("run.end", {"steps": self.report.steps, "groups": dict(self._producer.counts)})
        return self.report

    async def _step(self, step: int) -> None:
        parts, clock = self._parts, StepClock(self._parts.clock)
        self._producer.fill(self._served)
        groups = await self._producer.next_batch(
            deadline=Deadline.after(parts.clock, self._limits.wait_s, setting="trainer.wait_limit_s")
        )
        clock.lap("wait")
        numbers = (
            GroupMetrics.of(groups, step=step, bound=self._schedule.max_staleness)
            if self._trains
            else GroupMetrics.of(groups, step=1, bound=0)  # nothing is newer than the first weights
        )
        self.report.max_staleness_seen = max(self.report.max_staleness_seen, numbers.max_staleness)
        if numbers.max_staleness > self._schedule.max_staleness:
            raise RunFailed(
                f"step {step} would train tokens of staleness {numbers.max_staleness}, more than the bound "
                f"{self._schedule.max_staleness}"
            )
        if parts.on_batch is not None:
            parts.on_batch(step, groups)
        self._replicas.ask()
        sleeper = parts.checkpoint if self._schedule.sleep_while_training else None
        if sleeper is not None:
            await self._within(sleeper.sleep, "putting replicas to sleep", sleeper, "sync")
            clock.lap("sleep")
        parts.events.emit("step.begin", {"step": step, "uids": [str(group.uid) for group in groups]})
        batch, context = self._batch(groups), StepContext(step=step, total_steps=self._total_steps)
        result = await self._within(
            lambda deadline: parts.workers.update(batch, context, deadline=deadline),
            f"step {step}",
            parts.workers,
            "step",
        )
        clock.lap("update", parts=result.seconds)
        self._count(step, numbers, result)
        parts.events.emit("step.end", {"step": step, "rows": result.rows, "updates": result.updates})
        if sleeper is not None:
            await self._within(sleeper.wake, "waking replicas", sleeper, "sync")
            clock.lap("wake")
        if step % self._schedule.sync_every == 0:
            clock.lap("sync", parts=await self._sync(step))
        self._track(step, numbers, result, clock)

    async def _within(
        self, call: Callable[..., Awaitable[T]], subject: str, part: object, limit: Literal["step", "sync"]
    ) -> T:
        """Call a part with a deadline, and end the wait a moment later should the part not heed it."""
        clock = self._parts.clock
        limit_s, setting = self._limits.step_s if limit == "step" else self._limits.sync_s, f"trainer.{limit}_limit_s"
        return await bounded(
            call(deadline=Deadline.after(clock, limit_s, setting=setting)),
            subject=subject,
            holder=type(part).__qualname__,
            deadline=Deadline.after(clock, limit_s + GRACE_S, setting=setting),
            clock=clock,
        )

    def _batch(self, groups: Sequence[GroupResult]) -> TrainBatch:
        rows = tuple(
            TrainRow(
                uid=str(group.uid),
                sample=sample.index,
                score=sample.score,
                payload=sample.payload,
                num_tokens=sample.num_tokens,
                num_trained=sample.num_trained,
            )
            for group in groups
            for sample in group.scored
            if sample.score is not None and sample.payload is not None
        )
        return TrainBatch(
            rows=rows,
            num_groups=len(groups),
            expected_rows=len(groups) * self._rules.n,
            allow_fewer=self._rules.unusable == "train_rest",
        )

    def _count(self, step: int, numbers: GroupMetrics, result: StepResult) -> None:
        if result.version != step:
            raise RunFailed(f"step {step} made version {result.version}: the policy workers are out of step")
        report = self.report
        report.steps = step
        report.final_version = step
        self._counters.groups_trained += numbers.groups
        self._counters.tokens_trained += sum(numbers.trained_tokens)
        report.groups_trained = self._counters.groups_trained
        report.rows_trained += result.rows
        report.updates += result.updates
        report.rewards.append(numbers.score)
        report.logprob_diffs += [m.value for m in result.metrics if m.name == "rollout/logprob_diff"]

    def _track(self, step: int, numbers: GroupMetrics, result: StepResult, clock: StepClock) -> None:
        metrics = numbers.as_dict() | reduce_metrics(result.metrics)
        self._signal.see(step, numbers.scores, metrics)
        self._mismatch.see(step, metrics)
        self.report.steps_without_signal = self._signal.without
        metrics |= self._counters.as_dict(self._producer.counts, ready=len(self._parts.store))
        metrics |= self._replicas.metrics()
        metrics |= clock.as_dict()
        metrics["samples_per_s"] = result.rows / max(clock.total, 1e-9)
        metrics["tokens_per_s"] = sum(numbers.trained_tokens) / max(clock.total, 1e-9)
        metrics["time"] = self._parts.clock.wall()
        for tracker in self._parts.trackers:
            tracker.log(step, metrics)

    async def _sync(self, version: int) -> Mapping[str, float]:
        """Bring the replicas to `version`, let those that hold it serve, and admit groups against it.

        Returns phase → seconds.
        """
        parts = self._parts
        failed: list[str] = []
        phases: Mapping[str, float] = {}
        if parts.checkpoint is not None and parts.servers is not None:
            report = await self._move(version, parts.checkpoint, parts.servers)
            failed = [row.replica for row in report.replicas if not row.committed]
            phases = report.seconds
        self._served = version
        parts.admission.acknowledge(version)
        parts.events.emit("sync.acknowledged", {"version": version, "failed": failed})
        if version < self._total_steps:
            self._producer.fill(version)
        return phases

    async def _move(self, version: int, checkpoint: CheckpointEngineManager, servers: LLMServerManager) -> SyncReport:
        """Bring the replicas to `version`, and let only those that hold it serve."""
        report = await self._within(
            lambda deadline: checkpoint.update_weights(version, deadline=deadline),
            f"the sync of version {version}",
            checkpoint,
            "sync",
        )
        if not isinstance(report, SyncReport):
            raise RunFailed(
                f"{type(checkpoint).__qualname__}.update_weights returned {type(report).__name__}, and the "
                "contract wants a SyncReport"
            )
        failed = [row.replica for row in report.replicas if not row.committed]
        if failed:
            await servers.exclude(failed)
            for row in report.replicas:
                if not row.committed:
                    _log.warning("replica %s does not serve version %d: %s", row.replica, version, row.error)
        await servers.admit([row.replica for row in report.replicas if row.committed])
        return report

    async def _validate(self) -> None:
        """Validate what is served. A validation that fails is reported and does not stop the run."""
        validator = self._parts.validator
        if validator is None:
            return
        try:
            report = await validator.run(self._served)
        except Exception as exc:
            _log.exception("validation of version %d failed", self._served)
            self._parts.events.emit("validate.failed", {"version": self._served, "error": str(exc)})
            return
        self.report.validations.append(report)
        if report.score is not None:
            for tracker in self._parts.trackers:
                tracker.log(self.report.steps, {"val/score": report.score, "val/version": float(report.version)})

    async def _watch_failures(self) -> None:
        """Log every failure, and stop the run when a policy worker died: it cannot go on without."""
        if self._parts.failures is None:
            return
        async for record in self._parts.failures:
            self._counters.process_failures += 1
            self._parts.events.emit(
                "failure", {"role": record.role, "rank": record.rank, "node": record.node, "cause": record.cause}
            )
            _log.error("%s", record)
            if record.role.startswith("policy"):
                self._producer.fail(RunFailed(str(record)))
