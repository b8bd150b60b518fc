"""What travels between a reward client and its child processes: frames of pickled tuples over two pipes.

Both ends run this code in the same installation, so pickle is safe here; it must stay free of heavy imports, because a
child that was killed is replaced in the middle of a step.
"""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from verl_contracts.rewards import RewardResult
from verl_contracts.samples import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from verl_contracts.rewards import RewardRequest

__all__ = ["Done", "FrameReader", "Job", "NotReady", "Ready", "Setup", "pack", "write_all"]

_HEADER = struct.Struct("<I")
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """First frame to a child: which function."""

    function: str
    """Name or class path of a `RewardFunction`."""
    options: Mapping[str, object]
    key: str
    """Config key that named it, for messages."""
    limit_s: float
    """Longest that one reward may run."""
    start_limit_s: float = 60.0
    """Longest that loading the function may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One response to judge. Frames to a child hold tuples of these."""

    number: int
    request: RewardRequest
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The function is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReady:
    """The function cannot be loaded."""

    reason: str


class Done(NamedTuple):
    """One verdict. Sent as soon as it is known: the clock of the next job starts with it.

    A tuple of plain values, which costs a tenth of a dataclass to pickle; there are hundreds in a step.
    """

    number: int
    outcome: str
    score: float | None
    metrics: Mapping[str, float]
    reason: str

    @classmethod
    def of(cls, number: int, result: RewardResult) -> Done:
        """Return the verdict on job `number`."""
        return cls(number, result.outcome, result.score, result.metrics, result.reason)

    @property
    def result(self) -> RewardResult:
        """The verdict as the contract has it."""
        return RewardResult(outcome=Outcome(self.outcome), score=self.score, metrics=self.metrics, reason=self.reason)


def pack(value: object) -> bytes:
    """Return `value` as one frame."""
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload)) + payload


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to a blocking `fd`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """Take in `data`, and yield each frame that is now complete."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            value: object = pickle.loads(payload)
            yield value
