"""Who serves the next sequence. Owns every lease; refuses to know what a replica is or how it is reached.

The failure that it prevents is the black hole: a dead replica is always the least loaded one, so that routing without
outcomes sends everything to it. Here a lease is given back with an outcome, a failed replica gets no further lease,
and a lease from before it came back changes no count.

Pure asyncio: neither torch nor a runtime is needed, and time is the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_contracts.errors import NoHealthyReplica
from verl_contracts.rollout import FAILURE, BalancerRow, Lease
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import LeaseOutcome, LoadBalancer

__all__ = ["LeastLoadedBalancer"]

_log = logging.getLogger(__name__)

_MAX_KEYS = 65536
"""Sticky keys remembered, the most recent ones: a key is a hint, so that forgetting an old one costs a prefill."""


@dataclass(slots=True, kw_only=True)
class _Member:
    replica: str
    epoch: int
    capacity: int
    state: Literal["active", "draining", "quarantined"] = "active"
    in_flight: int = 0
    last_grant: int = 0


@dataclass(slots=True, kw_only=True)
class _Granted:
    lease: Lease
    at: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    keys: Sequence[str | None]
    granted: asyncio.Future[tuple[Lease, ...]]


class LeastLoadedBalancer:
    """Grants a lease where the key was last served, else on the replica with the least load for its capacity.

    Equal loads are served in turn, so that idle replicas share evenly and a repeated run takes the same routes. Calls
    that find no capacity wait in the order in which they came; a call for several leases gets all of them at once.
    """

    def __init__(self, *, clock: Clock, lease_limit_s: float | None = None) -> None:
        """Start with no replica. A lease older than `lease_limit_s` is taken back, since its holder must have died."""
        self._clock = clock
        self._lease_limit_s = lease_limit_s
        self._reaping: asyncio.TimerHandle | None = None
        self._members: dict[str, _Member] = {}
        self._epochs: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._leases: dict[int, _Granted] = {}  # in order of grant, hence of age
        self._waiting: deque[_Waiter] = deque()
        self._drains: dict[str, list[asyncio.Future[None]]] = {}
        self._served: OrderedDict[str, str] = OrderedDict()
        self._grants = 0

    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        """Grant `n` leases, one per key, all at once. Cancelled or timed out, it holds none."""
        if n < 1 or len(keys) != n:
            raise ValueError(f"as many keys as leases, and at least one, expected: n is {n}, {len(keys)} keys")
        self._reap()
        if not self._serving():
            raise self._none_left()
        if not self._waiting and self._room() >= n:
            return self._grant(keys)
        waiter = _Waiter(keys=keys, granted=asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._reap()
        try:
            return await bounded(
                waiter.granted,
                subject=f"{n} leases",
                holder=self._holders,
                deadline=deadline,
                clock=self._clock,
            )
        except BaseException:
            self._withdraw(waiter)
            raise

    async def acquire_some(self, keys: Sequence[str | None], /, *, deadline: Deadline) -> tuple[Lease, ...]:
        """Grant at least one lease, and more while there is capacity that nobody else waits for; in order of `keys`."""
        first = await self.acquire(1, keys=keys[:1], deadline=deadline)
        room = 0 if self._waiting else self._room()
        return first + self._grant(keys[1 : 1 + room])

    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /, *, reason: str = "") -> None:
        """Give leases back. `FAILURE` quarantines their replica, and `reason` is told to whoever finds none left."""
        for lease in leases:
            if not self._take_back(lease):
                continue
            member = self._members[lease.replica]
            if outcome == FAILURE and member.state != "quarantined":
                member.state = "quarantined"
                self._failures[member.replica] = reason or "failed"
                _log.warning("replica %s is quarantined: %s", member.replica, self._failures[member.replica])
                self._fail_waiting_if_hopeless()
        self._serve_waiting()

    async def add(self, replica: str, /, *, capacity: int) -> None:
        """Add a replica, or bring one back with a new epoch. One that serves already keeps its leases."""
        if capacity < 1:
            raise ValueError(f"the capacity of {replica} must be at least 1, got {capacity}")
        member = self._members.get(replica)
        if member is not None and member.state == "active":
            member.capacity = capacity
        else:
            if member is not None:
                self._forget(member)
            self._epochs[replica] = self._epochs.get(replica, 0) + 1
            self._failures.pop(replica, None)
            # Counts as just served, so that the others are asked first once and turns stay regular.
            self._members[replica] = _Member(
                replica=replica, epoch=self._epochs[replica], capacity=capacity, last_grant=self._grants
            )
        self._serve_waiting()

    async def drain(self, replica: str, /, *, deadline: Deadline) -> None:
        """Grant no further leases on it, and return when none is in flight. Harmless when it is unknown."""
        member = self._members.get(replica)
        if member is None:
            return
        if member.state == "active":
            member.state = "draining"
            self._fail_waiting_if_hopeless()
        if member.in_flight == 0:
            return
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains.setdefault(replica, []).append(drained)
        try:
            await bounded(
                drained,
                subject=f"drain of {replica}",
                holder=lambda: f"{member.in_flight} leases",
                deadline=deadline,
                clock=self._clock,
            )
        finally:
            if drained in (pending := self._drains.get(replica, [])):
                pending.remove(drained)

    async def remove(self, replica: str, /) -> None:
        """Forget it. Leases in flight become stale. Harmless when it is unknown."""
        member = self._members.get(replica)
        if member is not None:
            self._forget(member)
            self._fail_waiting_if_hopeless()
            self._serve_waiting()

    async def snapshot(self) -> tuple[BalancerRow, ...]:
        """Return all rows, in order of addition."""
        return tuple(
            BalancerRow(
                replica=member.replica,
                epoch=member.epoch,
                capacity=member.capacity,
                in_flight=member.in_flight,
                state=member.state,
            )
            for member in self._members.values()
        )

    def _serving(self) -> list[_Member]:
        return [member for member in self._members.values() if member.state == "active"]

    def _room(self) -> int:
        return sum(max(0, member.capacity - member.in_flight) for member in self._serving())

    def _grant(self, keys: Sequence[str | None]) -> tuple[Lease, ...]:
        return tuple(self._grant_one(key) for key in keys)

    def _grant_one(self, key: str | None) -> Lease:
        member = self._choose(key)
        self._grants += 1
        member.last_grant = self._grants
        member.in_flight += 1
        lease = Lease(lease_id=self._grants, replica=member.replica, epoch=member.epoch)
        self._leases[lease.lease_id] = _Granted(lease=lease, at=self._clock.now())
        if key is not None:
            self._served[key] = member.replica
            self._served.move_to_end(key)
            if len(self._served) > _MAX_KEYS:
                self._served.popitem(last=False)
        return lease

    def _choose(self, key: str | None) -> _Member:
        sticky = self._members.get(self._served.get(key, "")) if key is not None else None
        if sticky is not None and sticky.state == "active" and sticky.in_flight < sticky.capacity:
            return sticky
        return min(self._serving(), key=lambda member: (member.in_flight / member.capacity, member.last_grant))

    def _serve_waiting(self) -> None:
        while self._waiting and self._room() >= len(self._waiting[0].keys):
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                waiter.granted.set_result(self._grant(waiter.keys))

    def _withdraw(self, waiter: _Waiter) -> None:
        """Undo a wait that ended before its leases were seen, whether they had been granted or not."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            for lease in waiter.granted.result():
                self._take_back(lease)
        self._serve_waiting()

    def _take_back(self, lease: Lease) -> bool:
        """Count a lease as ended. Return whether it was in flight: a stale or repeated one changes nothing."""
        if self._leases.pop(lease.lease_id, None) is None:
            return False
        member = self._members[lease.replica]
        member.in_flight -= 1
        if member.in_flight == 0:
            self._settle(member.replica)
        return True

    def _reap(self) -> None:
        """Take back leases past the limit, and while somebody waits, look again when the next one is due."""
        if self._lease_limit_s is None:
            return
        now = self._clock.now()
        while self._leases:
            oldest = next(iter(self._leases.values()))
            due_in = oldest.at + self._lease_limit_s - now
            if due_in > 0.0:
                if self._waiting and self._reaping is None:
                    self._reaping = asyncio.get_running_loop().call_later(due_in, self._reap_again)
                break
            _log.warning("a lease on %s was never given back; its holder is gone", oldest.lease.replica)
            self._take_back(oldest.lease)
        self._serve_waiting()

    def _reap_again(self) -> None:
        self._reaping = None
        self._reap()

    def _forget(self, member: _Member) -> None:
        del self._members[member.replica]
        for lease_id in [i for i, granted in self._leases.items() if granted.lease.replica == member.replica]:
            del self._leases[lease_id]
        self._settle(member.replica)

    def _settle(self, replica: str) -> None:
        """Tell those who drain `replica` that nothing is in flight on it any more."""
        for drained in self._drains.pop(replica, ()):
            if not drained.done():
                drained.set_result(None)

    def _fail_waiting_if_hopeless(self) -> None:
        if self._serving():
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(self._none_left())

    def _none_left(self) -> NoHealthyReplica:
        rows = [
            f"{replica}: {self._failures.get(replica) or self._state_of(replica)}" for replica in sorted(self._epochs)
        ]
        return NoHealthyReplica(f"no replica may serve; {'; '.join(rows) or 'none was ever admitted'}")

    def _state_of(self, replica: str) -> str:
        member = self._members.get(replica)
        return member.state if member is not None else "removed"

    def _holders(self) -> str:
        rows = [f"{m.replica} ({m.in_flight} of {m.capacity}, {m.state})" for m in self._members.values()]
        return ", ".join(rows) or "no replica"


if TYPE_CHECKING:

    def _is_balancer(x: LeastLoadedBalancer) -> LoadBalancer:
        return x
