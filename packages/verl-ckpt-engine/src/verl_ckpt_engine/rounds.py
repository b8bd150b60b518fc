"""One sync of all replicas: at once, or a few at a time so that the others go on generating.

Owns the order of rounds and what they come to together. Each round is a transaction of its own, over its own replicas:
one that fails costs those, while the others keep the version that they have.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from verl_ckpt_engine.transaction import SENDER, Transaction, describe, failure
from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from verl_ckpt_engine.transaction import Member, Outcome
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import Replica
    from verl_contracts.weights import CheckpointSettings, TopologyPlanner, WeightSenderHost

__all__ = ["Rounds"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Brings `members` to `version`. `run` once."""

    version: int
    settings: CheckpointSettings
    cleanup_limit_s: float
    planner: TopologyPlanner
    sender: WeightSenderHost
    members: list[Member]
    clock: Clock
    events: EventSink
    deadline: Deadline
    set_version: Callable[[Replica, int | None], None]
    """Told whenever a replica's committed version changes."""
    _done: list[Transaction] = field(default_factory=list)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Phase → seconds in all rounds."""
        total = Counter[str]()
        for transaction in self._done:
            total.update(transaction.seconds)
        return dict(total)

    async def run(self) -> Outcome:
        """Do all rounds. Raises `WeightSyncError` when fewer than `min_healthy` replicas committed.

        After a round in which the sender failed there is no other one: it would fail again.
        """
        outcome: Outcome | None = None
        rounds = list(self._rounds())
        for number, members in enumerate(rounds):
            transaction = self._transaction(members, expected=None if outcome is None else outcome.digest)
            self._done.append(transaction)
            try:
                outcome = await transaction.run()
            except WeightSyncError as exc:
                if len(rounds) == 1:
                    raise
                if transaction.causes[0][0] != SENDER:
                    continue
                for member in (member for later in rounds[number + 1 :] for member in later):
                    member.error = f"not begun, for the sender failed before: {describe(exc)}"
                break
        committed = sum(member.committed for member in self.members)
        if outcome is None or committed < self.settings.min_healthy:
            raise failure(self.members, self._done, self.settings)
        return outcome

    def _rounds(self) -> Iterator[list[Member]]:
        size = self.settings.replicas_at_once or len(self.members)
        for first in range(0, len(self.members), size):
            yield self.members[first : first + size]

    def _transaction(self, members: list[Member], *, expected: str | None) -> Transaction:
        return Transaction(
            version=self.version,
            # Whether enough of them committed is a question of all rounds together.
            settings=replace(self.settings, min_healthy=1),
            cleanup_limit_s=self.cleanup_limit_s,
            planner=self.planner,
            sender=self.sender,
            members=members,
            clock=self.clock,
            events=self.events,
            deadline=self.deadline,
            set_version=self.set_version,
            expected=expected,
        )
