"""The host's end of the calls from one caller: start, cancel, and hand out what is complete.

Owns the promise that an exchange returns as soon as one call is complete, and that nothing is kept for a caller that is
gone: every call ends at its deadline even if nobody cancels it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

from verl_contracts.clock import Clock, Deadline
from verl_contracts.errors import ActorFailed
from verl_contracts.failures import FailureRecord
from verl_runtime.objects import Exited, Stopped
from verl_runtime.ray.wire import CallRow, ReplyRow, pack, pack_error, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from verl_runtime.objects import HostedObject

__all__ = ["Session"]

_GRACE_S = 1.0
"""How long after its deadline a call may run on; by then its caller has cancelled it, if there still is one."""
_POLL_S = 20.0
"""Longest that an exchange stays here; the caller sends another."""
_GATHER_TICKS = 3
"""Turns of the event loop for which results that come together are gathered, when no other call runs."""
_GATHER_S = 0.001
"""Seconds for which they are gathered while others run: an exchange costs about as much processor time."""


class Session:
    """Calls of one caller. Used from the host's default event loop."""

    def __init__(
        self,
        hosted: HostedObject,
        *,
        role: str,
        rank: int,
        clock: Clock,
        on_exit: Callable[[str], None],
    ) -> None:
        self._hosted = hosted
        self._role = role
        self._rank = rank
        self._clock = clock
        self._on_exit = on_exit
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._done: list[ReplyRow] = []
        self._waiter: asyncio.Future[None] | None = None
        self.used_at = clock.now()
        """When the caller was last heard of."""

    @property
    def idle(self) -> bool:
        """Whether no call runs and no exchange waits."""
        return not self._tasks and self._waiter is None

    async def exchange(self, rows: Iterable[CallRow], cancels: Iterable[int]) -> list[ReplyRow]:
        """Start and cancel calls; return what is complete, waiting for the first if need be.

        A newer exchange sends an older one home, so that at most one waits here.
        """
        self.used_at = self._clock.now()
        loop = asyncio.get_running_loop()
        for row in rows:
            self._tasks[row.number] = loop.create_task(self._run(row))
        for number in cancels:
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
        self._wake()
        if not self._done and self._tasks:
            waiter = self._waiter = loop.create_future()
            await asyncio.wait({waiter}, timeout=_POLL_S)
            if self._waiter is not waiter:
                return []
            self._waiter = None
        if self._tasks:
            await asyncio.sleep(_GATHER_S)
        else:
            for _ in range(_GATHER_TICKS):
                await asyncio.sleep(0)
        done, self._done = self._done, []
        return done

    def cancel(self) -> set[asyncio.Task[None]]:
        """Cancel every call and return those that still unwind."""
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        return tasks

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _run(self, row: CallRow) -> None:
        try:
            async with asyncio.timeout(row.remaining_s + _GRACE_S):
                arguments = cast("Mapping[str, object]", unpack(row.data, row.refs))
                deadline = Deadline(at=self._clock.now() + row.remaining_s, limit_s=row.limit_s, setting=row.setting)
                result = await self._hosted.invoke(row.method, arguments, deadline=deadline)
            packed = pack(result)
            self._done.append(ReplyRow(row.number, packed.data, packed.refs, None))
        except Exited as exc:
            self._on_exit(str(exc))
        except (Stopped, asyncio.CancelledError) as exc:  # whoever gave the call up itself does not listen any more
            reason = str(exc) or f"stopped while {row.method!r} ran"
            record = FailureRecord(role=self._role, rank=self._rank, node=socket.gethostname(), cause=reason)
            self._done.append(pack_error(row.number, ActorFailed(record), record))
        except Exception as exc:
            record = FailureRecord.from_exception(exc, role=self._role, rank=self._rank)
            self._done.append(pack_error(row.number, exc, record))
        finally:
            del self._tasks[row.number]
            self._wake()
