"""The producer: keeps as many groups in play as admission allows, and hands over batches.

It owns the tasks that play groups, retries after infrastructure failures, and the rule for unusable samples. It refuses
to decide staleness (admission does) and to train. It prevents a crash of the rollout side from looking like the end of
the data: whatever ends a task reaches whoever waits for a batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, RunFailed, WaitTimeout
from verl_contracts.samples import GroupRequest, GroupUid
from verl_contracts.training import DropReason
from verl_contracts.waits import bounded
from verl_trainers.core.metrics import ADMITTED, DISCARDED_TOKENS, DROPPED, INFRASTRUCTURE, STALE, UNUSABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink
    from verl_contracts.failures import FailureRecord
    from verl_contracts.samples import GroupResult, Prompt, SampleResult
    from verl_contracts.tokens import SamplingParams
    from verl_contracts.training import AdmissionPolicy, DataSource, ExperienceStore

__all__ = ["GroupPlayer", "GroupProducer", "GroupRules", "Reject"]

_log = logging.getLogger(__name__)

_MOST_CAUSES = 10
"""Distinct causes of unusable groups that the log has a line for."""


class GroupPlayer(Protocol):
    """Turns admitted prompts into groups: the one method of an `AgentLoopManager` that the loop needs."""

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        """Play the group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """How groups are played and judged."""

    n: int
    """Samples in a group."""
    sampling: SamplingParams
    group_limit_s: float
    """Longest that one group may take."""
    unusable: Literal["refill", "train_rest", "raise"] = "refill"
    """What becomes of a group of which some samples have no score."""
    max_unusable_ratio: float = 0.5
    """Part of finished groups that may be unusable; more stops the run."""
    max_attempts: int = 3
    """Times that one prompt is admitted when the infrastructure fails under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A group that was given up."""

    uid: GroupUid
    reason: str


class GroupProducer:
    """Plays groups in the background. Driven from one event loop."""

    def __init__(
        self,
        *,
        admission: AdmissionPolicy,
        store: ExperienceStore,
        data: DataSource,
        agents: GroupPlayer,
        rules: GroupRules,
        min_ratio_groups: int,
        clock: Clock,
        events: EventSink,
    ) -> None:
        """Start nothing yet. The ratio of unusable groups is checked once `min_ratio_groups` have finished."""
        self._admission = admission
        self._store = store
        self._data = data
        self._agents = agents
        self._rules = rules
        self._min_ratio_groups = min_ratio_groups
        self._clock = clock
        self._events = events
        self._tasks: dict[GroupUid, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._exhausted = False
        self._version = 0
        self._said: set[str] = set()
        """Causes that the log has."""
        self.counts: Counter[str] = Counter()
        """Groups admitted, finished, unusable, dropped, ``dropped: REASON``; ``samples: OUTCOME``; discarded tokens."""
        self.rejects: list[Reject] = []
        """Groups that were given up, with the reason."""

    @property
    def in_play(self) -> int:
        """Groups that are being generated."""
        return len(self._tasks)

    def fill(self, version: int) -> None:
        """Start as many groups as admission has room for. `version` is what every serving replica holds at least."""
        self._version = version
        while self._fatal is None and not self._exhausted and self._admission.room() > 0:
            prompt = self._data.next()
            if prompt is None:
                self._exhausted = True
                self._changed.set()
                return
            self._start(prompt, attempt=0)

    def fail(self, cause: BaseException) -> None:
        """Make whoever waits for a batch raise, with `cause`."""
        if self._fatal is None:
            self._fatal = cause
        self._changed.set()

    async def next_batch(self, *, deadline: Deadline) -> tuple[GroupResult, ...]:
        """Return the groups of the next step, in order of uid, once admission can form it; they count as trained.

        Raises RunFailed when the rollout side failed, the data ended, or too many groups were unusable; `WaitTimeout`
        naming the groups waited for.
        """
        while True:
            self._changed.clear()
            if isinstance(self._fatal, RunFailed):
                raise self._fatal  # it says all; another one around it would only say it again
            if self._fatal is not None:
                raise RunFailed(f"rollout failed: {self._fatal}") from self._fatal
            uids = self._admission.select()
            if uids is not None:
                groups = self._store.take(uids)
                self._admission.trained(uids)
                return groups
            if self._exhausted and not self._tasks:
                raise RunFailed(
                    f"the data ended before step {self._admission.step} could be formed: {dict(self.counts)}; add "
                    "epochs or data, or ask for fewer steps"
                )
            await bounded(
                self._changed.wait(),
                subject=f"the batch of step {self._admission.step}",
                holder=self._holders,
                deadline=deadline,
                clock=self._clock,
            )

    async def close(self) -> None:
        """Cancel what is in play. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # wait: cancelled tasks end by themselves

    def _start(self, prompt: Prompt, attempt: int) -> None:
        uid = GroupUid(epoch=prompt.epoch, row=prompt.row, attempt=attempt)
        self._admission.admit(uid)
        self.counts[ADMITTED] += 1
        self._events.emit("group.admitted", {"uid": str(uid), "step": self._admission.step, "version": self._version})
        task = asyncio.get_running_loop().create_task(self._play(uid, prompt), name=f"group {uid}")
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._ended(uid, done))

    def _ended(self, uid: GroupUid, task: asyncio.Task[None]) -> None:
        self._tasks.pop(uid, None)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.fail(exc)
        self._changed.set()

    async def _play(self, uid: GroupUid, prompt: Prompt) -> None:
        request = GroupRequest(
            uid=uid, prompt=prompt, n=self._rules.n, sampling=self._rules.sampling, min_version=self._version
        )
        deadline = Deadline.after(self._clock, self._rules.group_limit_s, setting="trainer.wait_limit_s")
        try:
            result = await bounded(
                self._agents.run_group(request, deadline=deadline),
                subject=f"group {uid}",
                holder=type(self._agents).__qualname__,
                deadline=deadline,
                clock=self._clock,
            )
        except (ActorFailed, WaitTimeout) as exc:
            reason = f"infrastructure: {str(exc).splitlines()[0]}"
            self._drop(uid, INFRASTRUCTURE, reason)
            if uid.attempt + 1 >= self._rules.max_attempts:
                raise RunFailed(f"group {uid} failed {uid.attempt + 1} times; last: {exc}") from exc
            _log.warning("group %s is played again: %s", uid, reason)
            self._start(prompt, attempt=uid.attempt + 1)
            return
        self._finish(result)

    def _finish(self, result: GroupResult) -> None:
        uid = result.uid
        self.counts["finished"] += 1
        if len(result.samples) != self._rules.n:
            raise RunFailed(
                f"group {uid} came back with {len(result.samples)} samples instead of {self._rules.n}: the agent-loop "
                "manager must return one result per sample"
            )
        oldest = result.oldest_version
        first = next((sample for sample in result.samples if sample not in result.scored), None)
        failure = None if first is None else first.failure
        reason = self._unusable(result, failure)
        if reason is None and oldest is None:
            reason = "nothing to train on"
        self._events.emit(
            "group.finished",
            {
                "uid": str(uid),
                "scores": [sample.score for sample in result.samples],
                "oldest_version": oldest,
                "outcomes": dict(Counter(str(sample.outcome) for sample in result.samples)),
            },
        )
        self.counts.update(f"samples: {sample.outcome}" for sample in result.samples)
        if reason is not None or oldest is None:
            self._discard_tokens(result.samples)
            self._reject(uid, reason or "nothing to train on", failure)
            return
        if not self._admission.finish(uid, oldest_version=oldest):
            self._discard_tokens(result.samples)
            self._drop(uid, STALE, "stale")
            self.fill(self._version)
            return
        self._discard_tokens(sample for sample in result.samples if sample not in result.scored)
        self._store.put(result)
        self._changed.set()

    def _discard_tokens(self, samples: Iterable[SampleResult]) -> None:
        self.counts[DISCARDED_TOKENS] += sum(sample.num_trained for sample in samples)

    def _unusable(self, result: GroupResult, failure: FailureRecord | None) -> str | None:
        """Return why the group cannot be used, None when it can; `failure` is that of its first bad sample."""
        bad = [sample for sample in result.samples if sample not in result.scored]
        if not bad or (self._rules.unusable == "train_rest" and len(bad) < len(result.samples)):
            return None
        why = f": {failure.cause}" if failure is not None else ""
        text = f"{len(bad)} of {len(result.samples)} samples without a score, first {bad[0].outcome}{why}"
        if self._rules.unusable == "raise":
            raise _failed(f"group {result.uid}: {text}; reward.unusable=raise stops the run", failure)
        return text

    def _reject(self, uid: GroupUid, reason: str, failure: FailureRecord | None) -> None:
        """Give up an unusable group. The log has one line for each cause; every group is in the events."""
        self.counts["unusable"] += 1
        cause = reason if failure is None else failure.cause
        new = cause not in self._said and len(self._said) < _MOST_CAUSES
        if new:
            self._said.add(cause)
        self._drop(uid, UNUSABLE, reason, level=logging.WARNING if new else logging.DEBUG)
        finished, unusable = self.counts["finished"], self.counts["unusable"]
        if finished >= self._min_ratio_groups and unusable > self._rules.max_unusable_ratio * finished:
            text = (
                f"{unusable} of {finished} groups were unusable, more than reward.max_unusable_ratio="
                f"{self._rules.max_unusable_ratio} allows; last: group {uid}: {reason}"
            )
            raise _failed(text, failure)
        self.fill(self._version)

    def _drop(self, uid: GroupUid, kind: str, reason: str, *, level: int = logging.WARNING) -> None:
        self._admission.drop(uid, DropReason(reason))
        self._store.discard(uid)
        self.counts[DROPPED] += 1
        self.counts[f"{DROPPED}: {kind}"] += 1
        self.rejects.append(Reject(uid=uid, reason=reason))
        self._events.emit("group.dropped", {"uid": str(uid), "reason": reason})
        _log.log(level, "group %s was dropped: %s", uid, reason)

    def _holders(self) -> str:
        blocking = [str(uid) for uid in self._admission.blocking()]
        shown = ", ".join(blocking[:8]) + (f" and {len(blocking) - 8} more" if len(blocking) > 8 else "")
        return f"groups {shown}" if blocking else "admission of new groups"


def _failed(text: str, failure: FailureRecord | None) -> RunFailed:
    """Return the error, with the traceback of the process where it happened as its note."""
    error = RunFailed(text)
    if failure is not None and len(failure.lines) > 1:
        error.add_note(str(failure))
    return error
