"""The balancer as a control process, and its face elsewhere.

State lives in `BalancerActor` alone. It also knows where each replica can be called, so that a client that was built
before a replica was added can reach it when it is granted a lease there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.clock import Deadline
from verl_contracts.errors import StateError
from verl_contracts.rollout import ABORTED, BalancerRow, Lease
from verl_rollout.addresses import ReplicaAddress, answer, answers
from verl_rollout.balancer import LeastLoadedBalancer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import LeaseOutcome, LoadBalancer
    from verl_contracts.runtime import ActorContext, ActorRef, Caller

__all__ = ["BalancerActor", "RemoteBalancer"]

T = TypeVar("T")

_CALL_LIMIT_S = 30.0
"""Longest that a call may take which only changes counts."""
_GRACE_S = 5.0
"""How long after its limit the answer of a call that waits may come."""


class BalancerActor:
    """Hosts the one `LeastLoadedBalancer` of a manager and the addresses of its replicas."""

    def __init__(self, *, context: ActorContext, lease_limit_s: float | None = None) -> None:
        self._balancer = LeastLoadedBalancer(clock=context.clock, lease_limit_s=lease_limit_s)
        self._clock = context.clock
        self._addresses: dict[str, ReplicaAddress] = {}

    async def acquire(self, keys: tuple[str | None, ...], wait_s: float) -> tuple[Lease, ...]:
        """Grant one lease per key, within `wait_s`."""
        return await self._balancer.acquire(len(keys), keys=keys, deadline=Deadline.after(self._clock, wait_s))

    async def acquire_some(self, keys: tuple[str | None, ...], wait_s: float) -> tuple[Lease, ...]:
        """Grant leases for the first keys, at least one, within `wait_s`."""
        return await self._balancer.acquire_some(keys, deadline=Deadline.after(self._clock, wait_s))

    async def release(self, leases: tuple[Lease, ...], outcome: LeaseOutcome, reason: str) -> None:
        """Take leases back."""
        await self._balancer.release(leases, outcome, reason=reason)

    async def add(self, replica: str, capacity: int) -> None:
        """Let a replica serve."""
        await self._balancer.add(replica, capacity=capacity)

    async def drain(self, replica: str, wait_s: float) -> None:
        """Wait until a replica has nothing in flight, within `wait_s`."""
        await self._balancer.drain(replica, deadline=Deadline.after(self._clock, wait_s))

    async def remove(self, replica: str) -> None:
        """Let a replica serve no more."""
        await self._balancer.remove(replica)

    async def snapshot(self) -> tuple[BalancerRow, ...]:
        """Return all rows."""
        return await self._balancer.snapshot()

    async def register(self, address: ReplicaAddress) -> None:
        """Remember where a replica lives; the last address of a name counts."""
        self._addresses[address.replica] = address

    async def unregister(self, replica: str) -> None:
        """Forget where a replica lived."""
        self._addresses.pop(replica, None)

    async def locate(self, replica: str) -> ReplicaAddress:
        """Return where a replica lives."""
        address = self._addresses.get(replica)
        if address is None:
            known = ", ".join(sorted(self._addresses)) or "none"
            raise StateError(f"replica {replica} is not registered; registered: {known}")
        return address


class RemoteBalancer:
    """A `BalancerActor` seen from another process.

    A grant may be on its way when its caller is cancelled. So the remote call is never cut: it goes on, and leases that
    arrive for nobody are given back.
    """

    def __init__(self, *, caller: Caller, clock: Clock, actor: ActorRef) -> None:
        self._caller = caller
        self._clock = clock
        self._actor = actor
        self._tasks: set[asyncio.Task[object]] = set()

    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        """Grant `n` leases, one per key. Cancelled or timed out, it holds none."""
        if n != len(keys):
            raise ValueError(f"as many keys as leases expected: n is {n}, {len(keys)} keys")
        granting = self._background(self._granted(tuple(keys), deadline))
        try:
            return await asyncio.shield(granting)  # wait: the call inside has a limit
        except asyncio.CancelledError:
            granting.add_done_callback(self._return_unseen)
            raise

    async def _granted(self, keys: tuple[str | None, ...], deadline: Deadline) -> tuple[Lease, ...]:
        granted = await self._wait("acquire", deadline, keys=keys)
        return answers(granted, Lease, method="BalancerActor.acquire")

    def _return_unseen(self, granting: asyncio.Task[tuple[Lease, ...]]) -> None:
        if not granting.cancelled() and granting.exception() is None:
            self._background(self.release(granting.result(), ABORTED))

    def _background(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def acquire_some(self, keys: Sequence[str | None], /, *, deadline: Deadline) -> tuple[Lease, ...]:
        """Grant leases for the first of `keys`, at least one. Not to be cancelled: a grant on its way would be lost."""
        granted = await self._wait("acquire_some", deadline, keys=tuple(keys))
        return answers(granted, Lease, method="BalancerActor.acquire_some")

    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /, *, reason: str = "") -> None:
        """Give leases back."""
        await self._call("release", leases=tuple(leases), outcome=outcome, reason=reason)

    async def add(self, replica: str, /, *, capacity: int) -> None:
        """Let a replica serve, or serve again."""
        await self._call("add", replica=replica, capacity=capacity)

    async def drain(self, replica: str, /, *, deadline: Deadline) -> None:
        """Return when no lease of it is in flight."""
        await self._wait("drain", deadline, replica=replica)

    async def remove(self, replica: str, /) -> None:
        """Let a replica serve no more."""
        await self._call("remove", replica=replica)

    async def snapshot(self) -> tuple[BalancerRow, ...]:
        """Return all rows."""
        return answers(await self._call("snapshot"), BalancerRow, method="BalancerActor.snapshot")

    async def register(self, address: ReplicaAddress, /) -> None:
        """Tell where a replica lives, before it is added."""
        await self._call("register", address=address)

    async def unregister(self, replica: str, /) -> None:
        """Forget where a replica lived."""
        await self._call("unregister", replica=replica)

    async def locate(self, replica: str, /) -> ReplicaAddress:
        """Return where a replica lives."""
        return answer(await self._call("locate", replica=replica), ReplicaAddress, method="BalancerActor.locate")

    async def _wait(self, method: str, deadline: Deadline, **arguments: object) -> object:
        """Call what waits by itself, and leave it a moment longer: it knows better what it waited for."""
        arguments["wait_s"] = deadline.remaining(self._clock)
        limit = Deadline(at=deadline.at + _GRACE_S, limit_s=deadline.limit_s)
        return await self._caller.call(self._actor, method, arguments, deadline=limit)

    async def _call(self, method: str, **arguments: object) -> object:
        deadline = Deadline.after(self._clock, _CALL_LIMIT_S)
        return await self._caller.call(self._actor, method, arguments, deadline=deadline)


if TYPE_CHECKING:

    def _is_balancer(x: RemoteBalancer) -> LoadBalancer:
        return x
