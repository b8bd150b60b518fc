"""Objects that the runtime suite spawns. Here, not in a test module, so that any process can import them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING

from verl_contracts.failures import FailureRecord

if TYPE_CHECKING:
    from verl_contracts.clock import Deadline
    from verl_contracts.runtime import ActorContext, ActorRef

__all__ = ["Broken", "Probe"]


class Probe:
    """Answers questions about where and how it is called."""

    def __init__(self, *, context: ActorContext, tag: str = "") -> None:
        self._context = context
        self._tag = tag
        self._entered = 0
        self._busy = 0
        self._most_busy = 0
        self._hanging = 0
        self._cancelled = 0
        self._gate = asyncio.Event()

    async def identity(self) -> tuple[str, str, int, str]:
        """Return run id, role, rank and tag."""
        return self._context.run_id, self._context.role, self._context.rank, self._tag

    async def echo(self, *, value: object) -> object:
        """Return `value`."""
        return value

    def plain(self, *, value: object) -> object:
        """Return `value`, from the compute thread."""
        return value

    def plain_busy(self, *, seconds: float) -> int:
        """Hold the compute thread, and return how many calls were ever inside at once."""
        self._busy += 1
        self._most_busy = max(self._most_busy, self._busy)
        time.sleep(seconds)
        self._busy -= 1
        return self._most_busy

    async def meet(self, *, parties: int) -> int:
        """Return once `parties` calls are inside: only possible when they run at the same time."""
        self._entered += 1
        if self._entered >= parties:
            self._gate.set()
        async with asyncio.timeout(30.0):
            await self._gate.wait()
        return self._entered

    async def hang(self) -> None:
        """Wait until cancelled, and count that."""
        self._hanging += 1
        try:
            async with asyncio.timeout(600.0):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._cancelled += 1
            raise

    async def hanging(self) -> int:
        """Return how many `hang` calls were entered."""
        return self._hanging

    async def cancelled(self) -> int:
        """Return how many `hang` calls were cancelled."""
        return self._cancelled

    async def left(self, *, deadline: Deadline) -> tuple[float, float]:
        """Return the remaining seconds and the limit of the deadline that arrived."""
        return deadline.remaining(self._context.clock), deadline.limit_s

    async def fail(self, *, error: BaseException) -> None:
        """Raise `error`."""
        raise error

    def plain_fail(self, *, error: BaseException) -> None:
        """Raise `error` on the compute thread."""
        raise error

    async def report(self, *, cause: str) -> None:
        """Put a failure on the channel, and go on."""
        self._context.failures.report(
            FailureRecord(role=self._context.role, rank=self._context.rank, node="test", cause=cause)
        )

    async def ask(self, *, other: ActorRef, value: object, deadline: Deadline) -> object:
        """Call `echo` on another actor."""
        return await self._context.caller.call(other, "echo", {"value": value}, deadline=deadline)

    async def put(self, *, size: int) -> object:
        """Return a reference to `size` bytes that stay here."""
        return await self._context.caller.put(bytes(size))

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    async def thread(self) -> int:
        """Return the thread that runs coroutines."""
        return threading.get_ident()

    def crash(self) -> None:
        """End the process at once, as a segmentation fault would."""
        os._exit(3)


class Broken:
    """Raises while it is built."""

    def __init__(self, *, context: ActorContext, message: str) -> None:
        del context
        raise LookupError(message)
