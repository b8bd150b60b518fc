"""Leases for one process: taken and given back many at a time, however singly they are asked for.

A call to the balancer costs a good part of a millisecond, and a step asks for a hundred leases within one tick. So all
that is asked for in a tick travels in one call, and one call at a time is under way. That also settles who owns a grant
that arrives for a caller who gave up meanwhile: the desk does, and gives it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import ActorFailed, WaitTimeout
from verl_contracts.rollout import ABORTED, FAILURE

if TYPE_CHECKING:
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import Lease, LeaseOutcome
    from verl_rollout.remote_balancer import RemoteBalancer

__all__ = ["LeaseDesk"]

_log = logging.getLogger(__name__)

_GATHER_S = 0.005
"""Seconds for which leases are gathered before they are given back, unless somebody here waits for one."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    key: str | None
    deadline: Deadline
    granted: asyncio.Future[Lease]


class LeaseDesk:
    """Takes leases in the order in which they are asked for, and gives them back in the background."""

    def __init__(self, *, balancer: RemoteBalancer, clock: Clock) -> None:
        self._balancer = balancer
        self._clock = clock
        self._asked: deque[_Asked] = deque()
        self._taking: asyncio.Task[None] | None = None
        self._returned: dict[LeaseOutcome, list[Lease]] = {}
        self._returning: asyncio.Task[None] | None = None

    async def take(self, key: str | None, *, deadline: Deadline) -> Lease:
        """Return a lease, sticky to `key`. Cancelled, it holds none. Raises as `LoadBalancer.acquire` does."""
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(key=key, deadline=deadline, granted=granted))
        if self._taking is None:
            self._taking = asyncio.create_task(self._take_all())
        try:
            return await granted  # wait: the desk ends it at its deadline
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(granted.result(), ABORTED)  # granted in the very tick of the cancelling
            raise

    def give_back(self, lease: Lease, outcome: LeaseOutcome) -> None:
        """Give a lease of a healthy replica back, together with all others of this tick."""
        self._returned.setdefault(outcome, []).append(lease)
        if self._returning is None:
            self._returning = asyncio.create_task(self._return_all())

    async def quarantine(self, lease: Lease, reason: str) -> None:
        """Give a lease back with a failure, and return once its replica gets no further one."""
        await self._balancer.release((lease,), FAILURE, reason=reason)

    async def _take_all(self) -> None:
        try:
            while self._asked:
                await self._take_some()
        finally:
            self._taking = None
            self._fail(asyncio.CancelledError(), list(self._asked))  # only if this task was cancelled

    async def _take_some(self) -> None:
        asked = [each for each in self._asked if not each.granted.done()]
        if not asked:
            self._asked.clear()
            return
        limit = min((each.deadline for each in asked), key=lambda deadline: deadline.at)
        try:
            leases = await self._balancer.acquire_some([each.key for each in asked], deadline=limit)
        except WaitTimeout as exc:
            self._fail(exc, [each for each in asked if each.deadline.at <= limit.at])
            leases = ()
        except Exception as exc:
            self._fail(exc, asked)
            leases = ()
        for each, lease in zip(asked, leases, strict=False):
            if each.granted.done():
                self.give_back(lease, ABORTED)
            else:
                each.granted.set_result(lease)
        self._asked = deque(each for each in self._asked if not each.granted.done())

    async def _return_all(self) -> None:
        try:
            while self._returned:
                if not self._asked:
                    await self._clock.sleep(_GATHER_S)
                returned, self._returned = self._returned, {}
                for outcome, leases in returned.items():
                    await self._balancer.release(leases, outcome)
        except (ActorFailed, WaitTimeout) as exc:
            # Whoever asks for the next lease meets the same balancer, and raises; here nobody may be listening.
            _log.warning("leases could not be given back: %s", exc)
        finally:
            self._returning = None

    @staticmethod
    def _fail(exc: BaseException, asked: list[_Asked]) -> None:
        for each in asked:
            if each.granted.done():
                continue
            if isinstance(exc, asyncio.CancelledError):
                each.granted.cancel()
            else:
                each.granted.set_exception(exc)
