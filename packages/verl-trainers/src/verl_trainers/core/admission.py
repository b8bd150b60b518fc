"""Admission: what may be started, and what must be trained now, so that no token is staler than the bound.

One object decides both, for the producer and for the trainer. It prevents two failures: a run that trains on tokens
older than it says, and a run that stands still because what is due cannot fit into the steps that are left.

Counting admissions alone does not bound staleness, since an early group can be passed over again and again. So each
group has a deadline, and a batch may be formed only if what it leaves behind still fits, earliest deadline first, into
the steps that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import StateError
from verl_contracts.samples import GroupUid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.events import JsonValue
    from verl_contracts.training import AdmissionPolicy, DropReason

__all__ = ["BoundedAdmission"]


@dataclass(slots=True)
class _Group:
    deadline: int
    """Last step that may train it."""
    order: int
    """Position among admissions, to break ties."""
    ready: bool = False


class BoundedAdmission:
    """Admits while ``outstanding < (k + a + 2 - t) B`` and selects earliest deadline first.

    k is `max_staleness`, B `batch_groups`, a the version acknowledged by every serving replica, t the next step. No
    more is admitted than the steps up to `total_steps` can train.
    """

    def __init__(
        self, *, max_staleness: int, batch_groups: int, total_steps: int, most_outstanding: int | None = None
    ) -> None:
        """Admit nothing yet. `most_outstanding` of None means as many groups as the bound allows."""
        if max_staleness < 0 or batch_groups < 1 or total_steps < 1:
            raise ValueError(
                "max_staleness must be ≥ 0, batch_groups ≥ 1 and total_steps ≥ 1, "
                f"got {max_staleness}, {batch_groups} and {total_steps}"
            )
        if most_outstanding is not None and most_outstanding < batch_groups:
            raise ValueError(f"most_outstanding must be ≥ batch_groups ({most_outstanding} < {batch_groups})")
        self._k = max_staleness
        self._batch = batch_groups
        self._total = total_steps
        self._most = most_outstanding
        self._step = 1
        self._acknowledged = 0
        self._order = 0
        self._groups: dict[GroupUid, _Group] = {}

    @property
    def step(self) -> int:
        """The next step to train."""
        return self._step

    @property
    def outstanding(self) -> int:
        """Groups admitted and neither trained nor dropped."""
        return len(self._groups)

    def room(self) -> int:
        """Return how many more groups may be admitted now."""
        steps = min(self._k + self._acknowledged + 2 - self._step, self._total + 1 - self._step)
        most = steps * self._batch if self._most is None else min(steps * self._batch, self._most)
        return max(0, most - len(self._groups))

    def admit(self, uid: GroupUid, /) -> None:
        """Count `uid` as outstanding. Its deadline assumes the oldest version that may answer."""
        if uid in self._groups:
            raise StateError(f"group {uid} is outstanding already")
        if self.room() == 0:
            raise StateError(f"no room for group {uid} at step {self._step}: {len(self._groups)} are outstanding")
        self._groups[uid] = _Group(deadline=1 + self._k + self._acknowledged, order=self._order)
        self._order += 1

    def finish(self, uid: GroupUid, /, *, oldest_version: int) -> bool:
        """Mark `uid` as ready, with the deadline that its oldest token gives; False when that has passed."""
        group = self._group(uid)
        group.deadline = 1 + self._k + oldest_version
        group.ready = group.deadline >= self._step
        return group.ready

    def drop(self, uid: GroupUid, reason: DropReason, /) -> None:
        """Give up on `uid`; its place is free again."""
        self._group(uid)
        del self._groups[uid]

    def select(self) -> tuple[GroupUid, ...] | None:
        """Return the next batch, sorted by uid, or None while it cannot be formed."""
        ready = self._ready_by_deadline()
        if len(ready) < self._batch:
            return None
        batch = ready[: self._batch]
        if self._overfull(leaving_out=batch) is not None:
            return None
        return tuple(sorted(batch))

    def blocking(self) -> tuple[GroupUid, ...]:
        """Return the unfinished groups that the next batch waits for, sorted by uid."""
        batch = self._ready_by_deadline()[: self._batch]
        step = self._overfull(leaving_out=batch)
        return tuple(
            sorted(
                uid
                for uid, group in self._groups.items()
                if not group.ready and (step is None or group.deadline <= step)
            )
        )

    def trained(self, uids: Sequence[GroupUid], /) -> None:
        """Count the batch as trained and go on to the next step."""
        if sorted(uids) != list(self.select() or ()):
            raise StateError(f"step {self._step} must train {self.select()}, not {tuple(uids)}")
        for uid in uids:
            del self._groups[uid]
        self._step += 1

    def acknowledge(self, version: int, /) -> None:
        """Every serving replica holds at least `version`."""
        self._acknowledged = max(self._acknowledged, version)

    def state(self) -> Mapping[str, JsonValue]:
        """Return counters and outstanding groups."""
        return {
            "step": self._step,
            "acknowledged": self._acknowledged,
            "order": self._order,
            "groups": [[str(uid), group.deadline, group.order, group.ready] for uid, group in self._groups.items()],
        }

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        """Go on from `state`."""
        step, acknowledged, order, groups = (state[key] for key in ("step", "acknowledged", "order", "groups"))
        if not (isinstance(step, int) and isinstance(acknowledged, int) and isinstance(order, int)):
            raise StateError(f"not a state of admission: {dict(state)}")
        if isinstance(groups, str) or not isinstance(groups, list | tuple):
            raise StateError(f"not a state of admission: {dict(state)}")
        restored: dict[GroupUid, _Group] = {}
        for row in groups:
            if not isinstance(row, list | tuple) or len(row) != 4:
                raise StateError(f"not an outstanding group: {row}")
            uid, deadline, position, ready = row
            if not (isinstance(uid, str) and isinstance(deadline, int) and isinstance(position, int)):
                raise StateError(f"not an outstanding group: {row}")
            restored[GroupUid.parse(uid)] = _Group(deadline=deadline, order=position, ready=bool(ready))
        self._step, self._acknowledged, self._order, self._groups = step, acknowledged, order, restored

    def _group(self, uid: GroupUid) -> _Group:
        if uid not in self._groups:
            raise StateError(f"group {uid} is not outstanding")
        return self._groups[uid]

    def _ready_by_deadline(self) -> list[GroupUid]:
        ready = [(group.deadline, group.order, uid) for uid, group in self._groups.items() if group.ready]
        return [uid for _, _, uid in sorted(ready)]

    def _overfull(self, *, leaving_out: Sequence[GroupUid]) -> int | None:
        """Return the first step up to which more would be due than later steps can train; None when all fits."""
        gone = set(leaving_out)
        deadlines = sorted(group.deadline for uid, group in self._groups.items() if uid not in gone)
        for count, deadline in enumerate(deadlines, start=1):
            if count > max(0, deadline - self._step) * self._batch:
                return deadline
        return None


if TYPE_CHECKING:

    def _is_admission(x: BoundedAdmission) -> AdmissionPolicy:
        return x
