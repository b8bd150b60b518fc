"""Classes that the tests spawn. They live in a module of their own so that other processes can import them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from verl_contracts.failures import FailureRecord

if TYPE_CHECKING:
    from verl_contracts.clock import Deadline
    from verl_contracts.runtime import ActorContext, ActorRef, PayloadRef


class Pair:
    """Holds two values; can be pickled by reference only."""

    def __init__(self, left: object, right: object) -> None:
        self.left = left
        self.right = right

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and (self.left, self.right) == (other.left, other.right)

    __hash__ = None  # type: ignore[assignment]


class PairError(ValueError):
    """An error with two arguments."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)
        self.left = left
        self.right = right


class StubbornError(Exception):
    """Cannot be pickled: it holds a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Worker:
    """Does a little of everything that an actor may be asked."""

    def __init__(self, *, context: ActorContext, note: str | None = None, value: object = None) -> None:
        self._context = context
        self._note = note
        self._value = value
        self._running = 0
        self._most = 0
        self._events: list[str] = []
        self._gate = asyncio.Event()
        self._children: list[subprocess.Popen[bytes]] = []

    def pid(self) -> int:
        return os.getpid()

    def thread(self) -> str:
        return threading.current_thread().name

    def identity(self) -> tuple[str, str, int]:
        return self._context.run_id, self._context.role, self._context.rank

    def initial(self) -> object:
        return self._value

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def events(self) -> list[str]:
        return list(self._events)

    async def echo(self, value: object) -> object:
        return value

    def compute(self, seconds: float) -> int:
        """Block the compute thread; return how many ran at once at most."""
        self._running += 1
        self._most = max(self._most, self._running)
        time.sleep(seconds)
        self._running -= 1
        return self._most

    async def pause(self, seconds: float) -> str:
        self._events.append("pause")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._events.append("cancelled")
            raise
        return "rested"

    async def ignore_cancel(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                continue

    async def remaining(self, *, deadline: Deadline) -> float:
        return deadline.remaining(self._context.clock)

    def fail(self, left: int, right: int) -> None:
        try:
            raise KeyError("the first cause")
        except KeyError as exc:
            raise PairError(left, right) from exc

    async def fail_stubbornly(self) -> None:
        raise StubbornError("cannot travel")

    async def stubborn(self) -> object:
        return threading.Lock()

    async def block_loop(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251

    def leave(self, code: int) -> None:
        sys.exit(code)

    def leave_hard(self, code: int) -> None:
        os._exit(code)

    def vanish(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self) -> None:
        os.abort()

    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def report(self, text: str) -> None:
        record = FailureRecord(role=self._context.role, rank=self._context.rank, node="here", cause=text)
        self._context.failures.report(record)

    def start_child(self) -> int:
        """Start a child that ignores SIGTERM, in a session of its own."""
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        self._children.append(child)
        return child.pid

    async def relay(self, actor: ActorRef, method: str, count: int, *, deadline: Deadline) -> list[object]:
        """Call another actor `count` times at once."""
        calls = [self._context.caller.call(actor, method, {"value": n}, deadline=deadline) for n in range(count)]
        return list(await asyncio.gather(*calls))

    async def keep(self, size: int) -> PayloadRef:
        return await self._context.caller.put(bytes(size))

    async def length(self, ref: PayloadRef, *, deadline: Deadline) -> int:
        return len(cast("bytes", await self._context.caller.get(ref, deadline=deadline)))

    async def close(self) -> None:
        if self._note is not None:
            with open(self._note, "a", encoding="utf-8") as file:  # noqa: ASYNC230, PTH123
                file.write("closed\n")


class Refuses:
    """Fails in its constructor."""

    def __init__(self, *, context: ActorContext) -> None:
        try:
            raise OSError("port 1 is taken")
        except OSError as exc:
            raise RuntimeError("cannot serve") from exc


class DiesInInit:
    """Ends its process in its constructor."""

    def __init__(self, *, context: ActorContext) -> None:
        sys.stderr.write("about to die\n")
        os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    """Takes long to construct."""

    def __init__(self, *, context: ActorContext, seconds: float, note: str) -> None:
        Path(note).write_text(str(os.getpid()), encoding="ascii")
        time.sleep(seconds)


def not_a_class() -> None:
    """Present so that a path can name it by mistake."""
