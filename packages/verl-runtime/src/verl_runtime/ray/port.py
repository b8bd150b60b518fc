"""One caller's end of the calls to one actor.

Calls made within one tick of the event loop travel as one remote `exchange`, and every exchange brings back whatever
is complete by then. While calls are pending, one exchange is kept at the host, so a result leaves as soon as it exists;
hence 64 calls in a tick cost one or two remote calls, and a long call never delays a short one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from typing import TYPE_CHECKING, Protocol

from verl_contracts.errors import ActorFailed
from verl_contracts.waits import bounded
from verl_runtime.ray.wire import CallRow, pack, pack_calls, unpack_replies, unpack_reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.failures import FailureRecord
    from verl_contracts.runtime import ActorRef
    from verl_runtime.ray.wire import Packet

__all__ = ["Exchange", "Port"]

_log = logging.getLogger(__name__)


class Exchange(Protocol):
    """The remote method of a host, as Ray hands it out."""

    def remote(self, session: str, calls: Packet, cancels: Sequence[int], /) -> Awaitable[Packet]:
        """Send calls and cancellations; the result holds what is complete."""
        ...


class Port:
    """Calls one actor. Used from one event loop."""

    def __init__(
        self,
        actor: ActorRef,
        exchange: Exchange,
        *,
        clock: Clock,
        examine: Callable[[ActorRef, BaseException], Awaitable[FailureRecord]],
    ) -> None:
        self._actor = actor
        self._exchange = exchange
        self._clock = clock
        self._examine = examine
        self._session = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._numbers = itertools.count()
        self._outbox: dict[int, CallRow] = {}
        self._cancels: list[int] = []
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._flush_is_due = False
        self._death: FailureRecord | None = None
        self.exchanges = 0
        """Remote calls made so far."""

    async def call(self, method: str, arguments: Mapping[str, object], *, deadline: Deadline) -> object:
        """Call ``method(**arguments)``."""
        if self._death is not None:
            raise ActorFailed(self._death)
        number = next(self._numbers)
        packed = pack(dict(arguments))
        remaining_s = deadline.remaining(self._clock)
        outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._pending[number] = outcome
        self._outbox[number] = CallRow(
            number, method, packed.data, packed.refs, remaining_s, deadline.limit_s, deadline.setting
        )
        self._schedule()
        try:
            return await bounded(
                outcome,
                subject=f"{self._actor.role}[{self._actor.rank}].{method}",
                holder=self._actor.name,
                deadline=deadline,
                clock=self._clock,
            )
        finally:
            if self._pending.pop(number, None) is not None and self._outbox.pop(number, None) is None:
                self._cancels.append(number)
                self._schedule()

    def fail(self, record: FailureRecord) -> None:
        """Fail the pending calls and all later ones."""
        if self._death is not None:
            return
        self._death = record
        self._outbox.clear()
        pending, self._pending = self._pending, {}
        for outcome in pending.values():
            if not outcome.done():
                outcome.set_exception(ActorFailed(record))
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    def _schedule(self) -> None:
        if not self._flush_is_due and self._death is None:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._death is not None:
            return
        rows, self._outbox = list(self._outbox.values()), {}
        cancels, self._cancels = self._cancels, []
        if not rows and not cancels and (self._tasks or not self._pending):
            return
        self.exchanges += 1
        task = asyncio.get_running_loop().create_task(self._collect(rows, cancels))
        self._tasks.add(task)
        task.add_done_callback(self._collected)

    async def _collect(self, rows: Sequence[CallRow], cancels: Sequence[int]) -> None:
        try:
            packet = await self._exchange.remote(self._session, pack_calls(rows), cancels)
        except Exception as exc:  # Ray's many errors for an actor, a node or a cluster that is gone
            self.fail(await self._examine(self._actor, exc))
            return
        for reply in unpack_replies(packet):
            outcome = self._pending.pop(reply.number, None)
            if outcome is None or outcome.done():
                continue
            try:
                outcome.set_result(unpack_reply(reply))
            except Exception as exc:
                outcome.set_exception(exc)

    def _collected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("collecting results of %s failed", self._actor.name, exc_info=error)
        if self._pending and not self._tasks:
            self._schedule()
