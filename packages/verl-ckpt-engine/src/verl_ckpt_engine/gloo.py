"""The `gloo` backend: buckets through `torch.distributed`, between processes and hosts.

Owns groups of two ranks, one for each edge of the tree, beside whatever groups the trainer and the engine have. A group
of all would wait for the slowest of all to join, and break for all with any one.

A bucket is a broadcast from rank 0, because gloo runs that on a thread of its own, and waiting for it may be given up:
a thread that is inside a send while the interpreter goes away would take the process down with it.
"""

from __future__ import annotations

import atexit
import ctypes
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from verl_ckpt_engine.stream.receiver import StreamReceiver
from verl_ckpt_engine.stream.routes import TreePlanner
from verl_ckpt_engine.stream.sender import StreamSender
from verl_contracts.weights import WireFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import Work

    from verl_ckpt_engine.stream.medium import Inlet, Medium, Outlet
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import TopologyPlanner, WeightBackend, WeightReceiver, WeightSender

__all__ = ["GlooBackend"]

_SLICE_S: Final = 0.05
"""Longest that a thread is inside gloo or the store at a stretch."""
_ENTERS: Final = "enters"
"""Begins the key that a rank sets before it enters the group."""


class _Group(Protocol):
    """What torch's stubs do not tell of a process group of gloo."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Work: ...


class _Pair:
    """Two ranks that meet at a store: the parent, rank 0, has it."""

    def __init__(self, host: str, rank: int, address: Mapping[str, str], clock: Clock) -> None:
        self._host = host
        self._rank = rank
        self._clock = clock
        self.address: Mapping[str, str] = address
        self._server: TCPStore | None = None
        self._group: _Group | None = None
        self._work: Work | None = None
        """What was begun and not seen to end."""
        self._cut = False
        if rank == 0:
            self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.address = {"store": str(self._server.port), "key": uuid.uuid4().hex}

    def open(self, deadline: Deadline) -> None:
        """Meet the other rank."""
        _bury()
        limit = self._limit(deadline)
        store = self._server or TCPStore(self._host, int(self.address["store"]), is_master=False, timeout=limit)
        store.set_timeout(limit)
        pair = PrefixStore(self.address["key"], store)
        pair.set(f"{_ENTERS}{self._rank}", "")
        while not pair.check([f"{_ENTERS}{1 - self._rank}"]):  # entering the group blocks until both do
            self._limit(deadline)
            time.sleep(0.002)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = limit
        options._threads = 1
        self._group = cast("_Group", ProcessGroupGloo(pair, self._rank, 2, options))

    def push(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Send `data`."""
        self._move(data, deadline)

    def pull(self, place: Mapping[str, str], slot: int, into: torch.Tensor, deadline: Deadline) -> None:
        """Receive into `into`."""
        self._move(into, deadline)

    def cut(self) -> None:
        """Make what blocks raise soon."""
        self._cut = True

    def close(self) -> None:
        """Leave; the other rank sees the connection end."""
        self._cut = True
        if self._group is not None and self._work is not None and not self._work.is_completed():
            _unfinished.append((self._group, self._work))
        self._group = self._server = self._work = None

    def _move(self, data: torch.Tensor, deadline: Deadline) -> None:
        if self._group is None:
            raise RuntimeError("the edge is not open")
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._limit(deadline)
        work = self._work = self._group.broadcast([data], options)
        while not work.is_completed():
            with suppress(RuntimeError):  # it did not end yet; what it ends with is raised below
                work.wait(timedelta(seconds=_SLICE_S))
            if not work.is_completed():
                self._limit(deadline)
        self._work = None
        work.wait()  # wait: it is over

    def _limit(self, deadline: Deadline) -> timedelta:
        """Return what is left. Raises when that is nothing, or the edge was cut."""
        left = deadline.remaining(self._clock)
        if self._cut or left <= 0.0:
            raise RuntimeError("it was given up")
        return timedelta(seconds=left)


_unfinished: list[tuple[_Group, Work]] = []
"""Groups in which something still moves after they were given up. To let one go would wait for that."""


def _bury() -> None:
    """Let the groups go in which nothing moves any more."""
    _unfinished[:] = [(group, work) for group, work in _unfinished if not work.is_completed()]


@atexit.register
def _keep() -> None:
    """Keep what cannot be let go now beyond the end of the interpreter, which would wait for it."""
    _bury()
    for part in (part for pair in _unfinished for part in pair):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))


class GlooMedium:
    """Plain memory, moved by gloo."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory of this process."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, memory: torch.Tensor) -> None:
        """Nothing is registered anywhere."""

    def place(self, slots: Sequence[torch.Tensor]) -> Mapping[str, str]:
        """Nothing: the parent sends."""
        return {}

    def outlet(self, host: str, clock: Clock) -> Outlet:
        """Make the parent's end."""
        return _Pair(host, 0, {}, clock)

    def inlet(self, host: str, address: Mapping[str, str], clock: Clock) -> Inlet:
        """Make the child's end."""
        return _Pair(host, 1, address, clock)

    def close(self) -> None:
        """Nothing is held."""


class GlooSender(StreamSender):
    """One trainer rank."""

    medium = GlooMedium


class GlooReceiver(StreamReceiver):
    """One engine rank."""

    medium = GlooMedium


class GlooBackend:
    """Moves weights between processes and hosts over TCP."""

    sender_class: ClassVar[type[WeightSender]] = GlooSender
    receiver_class: ClassVar[type[WeightReceiver]] = GlooReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = TreePlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WireFormat(format_id="verl-buckets", version=1),)


if TYPE_CHECKING:

    def _is_backend(x: GlooBackend) -> WeightBackend:
        return x

    def _is_medium(x: GlooMedium) -> Medium:
        return x
