"""What one failure looks like, wherever it happened. All of them reach the driver through one channel."""

from __future__ import annotations

import socket
import traceback
from dataclasses import dataclass
from typing import Protocol

from verl_contracts.errors import WaitTimeout

__all__ = ["MAX_LINES", "FailureRecord", "FailureSink", "first_cause"]

MAX_LINES = 30
"""Most lines kept of a failure's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One failure: who, where, the first cause, and the last lines that were printed."""

    role: str
    """Role of the process, for example ``"replica"``."""
    rank: int
    """Rank within the role."""
    node: str
    """Host name."""
    cause: str
    """First cause in one line, for example ``"RuntimeError: out of memory"`` or ``"killed by signal 9"``."""
    lines: tuple[str, ...] = ()
    """Last output or traceback lines, at most `MAX_LINES`."""

    @classmethod
    def from_exception(cls, exc: BaseException, *, role: str, rank: int) -> FailureRecord:
        """Describe `exc`, with its `first_cause`."""
        first = first_cause(exc)
        text = "".join(traceback.format_exception(exc)).splitlines()
        return cls(
            role=role,
            rank=rank,
            node=socket.gethostname(),
            cause=f"{type(first).__name__}: {first}",
            lines=tuple(text[-MAX_LINES:]),
        )

    def __str__(self) -> str:
        head = f"{self.role}[{self.rank}] on {self.node}: {self.cause}"
        return "\n".join([head, *(f"  | {line}" for line in self.lines)])


def first_cause(exc: BaseException) -> BaseException:
    """Return the innermost exception that `exc` was raised from, which may be `exc`.

    A wait that ran out is a cause itself: inside it there is only the cancelling of what was awaited.
    """
    first = exc
    seen = {id(first)}
    while not isinstance(first, WaitTimeout):
        inner = first.__cause__ or (None if first.__suppress_context__ else first.__context__)
        if inner is None or id(inner) in seen:
            break
        first = inner
        seen.add(id(first))
    return first


class FailureSink(Protocol):
    """Where a process reports a failure that it survives. One method, because reading is the runtime's business.

    Reporting never blocks and never raises. Order between processes is undefined.
    """

    def report(self, record: FailureRecord, /) -> None:
        """Send `record` to the driver."""
        ...
