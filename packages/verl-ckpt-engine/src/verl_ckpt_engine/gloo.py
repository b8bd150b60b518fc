"""The `gloo` and `nccl` backends: buckets through `torch.distributed`, in CPU memory or from GPU to GPU.

Owns groups of two ranks, one for each edge of the tree, beside whatever groups the trainer and the engine have. A group
of all would wait for the slowest of all to join, and break for all with any one.
"""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

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


class _Group(Protocol):
    """What torch's stubs do not tell of a process group of gloo."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...


class _Pair:
    """Two ranks that meet at a store: the parent, rank 0, has it."""

    def __init__(self, host: str, rank: int, address: Mapping[str, str], clock: Clock) -> None:
        self._host = host
        self._rank = rank
        self._clock = clock
        self.address: Mapping[str, str] = address
        self._store: Store | None = None
        self._group: _Group | None = None
        if rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._store = store
            self.address = {"store": str(store.port), "key": uuid.uuid4().hex}

    def open(self, deadline: Deadline) -> None:
        """Meet the other rank."""
        limit = self._limit(deadline)
        store = self._store or TCPStore(self._host, int(self.address["store"]), is_master=False, timeout=limit)
        store.set_timeout(limit)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = limit
        options._threads = 1
        pair = PrefixStore(self.address["key"], store)
        self._group = cast("_Group", ProcessGroupGloo(pair, self._rank, 2, options))

    def push(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Send `data`."""
        self._open_group().send([data], 1, 0).wait(self._limit(deadline))

    def pull(self, place: Mapping[str, str], slot: int, into: torch.Tensor, deadline: Deadline) -> None:
        """Receive into `into`."""
        self._open_group().recv([into], 0, 0).wait(self._limit(deadline))

    def close(self) -> None:
        """Leave; the other rank sees the connection end."""
        self._group = self._store = None

    def _open_group(self) -> _Group:
        if self._group is None:
            raise RuntimeError("the edge is not open")
        return self._group

    def _limit(self, deadline: Deadline) -> timedelta:
        # 0 would mean for ever.
        return timedelta(seconds=max(0.001, deadline.remaining(self._clock)))


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
