"""What the replicas did during a step, asked of them beside the step's own work.

Owns the asking and the difference between two answers. It prevents a step from waiting for a replica that does not
answer: what has come by the end of the step is counted, and whoever is silent is left out and not asked again until
its call is over.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from verl_contracts.clock import Deadline
from verl_contracts.rollout import DEAD, INVALID, ReplicaStatus
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import LLMServerManager, Replica

__all__ = ["ReplicaWatch", "SeenStatus", "replica_metrics"]

_log = logging.getLogger(__name__)

ASK_LIMIT_S = 5.0
"""Longest that a replica may take to tell its status; no step waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStatus:
    """A status, and when it came."""

    status: ReplicaStatus
    at: float
    """Monotonic seconds on the asker's clock."""


class _Work(NamedTuple):
    """Counters of a replica: since its start, or between two answers."""

    generated: float
    prompt: float
    cached: float
    busy_s: float

    @classmethod
    def of(cls, status: ReplicaStatus) -> _Work:
        """Return those of a status."""
        return cls(status.generated_tokens, status.prompt_tokens, status.cached_prompt_tokens, status.busy_s)


class ReplicaWatch:
    """Asks every replica for its status once a step, in the background.

    `ask` once before the first step; then `ask`, the step's own work, and `metrics`, in turn.
    """

    def __init__(self, servers: LLMServerManager | None, *, clock: Clock) -> None:
        """Ask nobody yet; None means that there are no replicas, and then there are no metrics."""
        self._servers = servers
        self._clock = clock
        self._before: dict[str, SeenStatus] = {}
        self._now: dict[str, SeenStatus] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()

    def ask(self) -> None:
        """Begin to ask all of them, and return at once."""
        self._before |= self._now
        self._now = {}
        for replica in () if self._servers is None else self._servers.replicas():
            name = replica.replica_id
            if name not in self._asking:
                asking = self._ask(replica)
                self._asking[name] = asyncio.get_running_loop().create_task(asking, name=f"status of {name}")

    def metrics(self) -> dict[str, float]:
        """Return the numbers of those that have answered since `ask`."""
        return replica_metrics(self._before, self._now)

    async def close(self) -> None:
        """Ask no more. Idempotent."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # wait: cancelled tasks end by themselves

    async def _ask(self, replica: Replica) -> None:
        """Note the status of one replica. One that fails to tell it is left out: its metrics are not worth a run."""
        name = replica.replica_id
        deadline = Deadline.after(self._clock, ASK_LIMIT_S)
        try:
            status = await bounded(
                replica.status(deadline=deadline),
                subject="its status",
                holder=name,
                deadline=deadline,
                clock=self._clock,
            )
            if not isinstance(status, ReplicaStatus):
                raise TypeError(f"status() returned {type(status).__name__}, and the contract wants a ReplicaStatus")
        except Exception as exc:
            if name not in self._silent:
                _log.warning("the metrics leave out replica %s until it tells its status: %s", name, exc)
            self._silent.add(name)
        else:
            self._silent.discard(name)
            self._now[name] = SeenStatus(status=status, at=self._clock.now())
        finally:
            del self._asking[name]


def replica_metrics(before: Mapping[str, SeenStatus], now: Mapping[str, SeenStatus]) -> dict[str, float]:
    """Return flat metrics over the replicas in `now`; nothing when there are none.

    Rates need two answers: a replica that is not in `before` has none yet. Each counts over the time between its own.
    """
    if not now:
        return {}
    statuses = [seen.status for seen in now.values()]
    flat = {
        "rollout/replicas": float(sum(status.state not in (INVALID, DEAD) for status in statuses)),
        "rollout/running": float(sum(status.running for status in statuses)),
        "rollout/waiting": float(sum(status.waiting for status in statuses)),
    }
    pairs = [(before[name], seen) for name, seen in now.items() if name in before]
    done = [(_work(old.status, new.status), new.at - old.at) for old, new in pairs if new.at > old.at]
    if done:
        flat["rollout/generated_tokens_per_s"] = sum(work.generated / seconds for work, seconds in done)
        # An answer travels, so a replica may seem to have computed a little longer than the time between two of them.
        flat["rollout/busy_share"] = sum(min(1.0, work.busy_s / seconds) for work, seconds in done) / len(done)
    prompt = sum(work.prompt for work, _ in done)
    if prompt > 0:
        flat["rollout/prefix_cache_hit_share"] = sum(work.cached for work, _ in done) / prompt
    return flat


def _work(before: ReplicaStatus, now: ReplicaStatus) -> _Work:
    """Return what was done between two statuses; a counter that fell tells of a new start, and then all are from 0."""
    old, new = _Work.of(before), _Work.of(now)
    if any(later < earlier for earlier, later in zip(old, new, strict=True)):
        return new
    return _Work(*(later - earlier for earlier, later in zip(old, new, strict=True)))
