"""The `mooncake` backend: buckets through Mooncake's transfer engine, over RDMA where it finds some, else over TCP.

Owns one engine for each rank, which lives as long as its slots: memory is let go only when no engine can touch it. A
child fetches each bucket itself. A fetch that was given up ends with its engine, and with nothing less.
"""

from __future__ import annotations

import importlib
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import torch

from verl_ckpt_engine.stream.lines import own_host
from verl_ckpt_engine.stream.polling import Polling
from verl_ckpt_engine.stream.receiver import StreamReceiver
from verl_ckpt_engine.stream.routes import TreePlanner
from verl_ckpt_engine.stream.sender import StreamSender
from verl_contracts.weights import WireFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from verl_ckpt_engine.stream.medium import Inlet, Medium, Outlet
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import TopologyPlanner, WeightBackend, WeightReceiver, WeightSender

__all__ = ["MooncakeBackend"]


def _found() -> ModuleType:
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as exc:
        fix = "pip install 'verl-ckpt-engine[mooncake]'"
        raise ModuleNotFoundError(f"the mooncake backend needs Mooncake: {fix}", name="mooncake") from exc
    except ImportError as exc:
        raise ImportError(f"{exc}; Mooncake needs libibverbs1, libnuma1 and libcurl4 of the system") from exc


_mooncake = _found()


class _Library(Protocol):
    """What is used of the library's engines."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, num_bytes: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def batch_transfer_async_read(
        self, session: str, here: list[int], there: list[int], num_bytes: list[int], /
    ) -> int: ...
    def transfer_check_status(self, batch: int, /) -> int: ...


_UNREACHED: Final = (0, 2**64 - 1)
"""What stands for a batch that was not begun."""


class _Engine:
    """The library's engine, and the memory that it may touch. For any thread.

    No local variable holds the library's own object: the traceback of an error would keep it alive.
    """

    def __init__(self) -> None:
        self._library: _Library | None = _mooncake.TransferEngine()
        host = own_host()
        if self._use().initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError(f"no engine can be made at {host}; Mooncake says why on stderr")
        self.session = f"{host}:{self._use().get_rpc_port()}"
        self._lock = threading.RLock()  # garbage collection may close it in a thread that has it
        self._slots: dict[int, torch.Tensor] = {}
        self._wanted: set[int] = set()
        """Addresses of those that were not freed."""
        self._inside = 0
        self.closed = False
        """Whether nobody may begin to use it."""

    def _use(self) -> _Library:
        if self._library is None:
            raise RuntimeError("the engine is closed")
        return self._library

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory that peers may read."""
        slot = torch.empty(num_bytes, dtype=torch.uint8)
        if self._use().register_memory(slot.data_ptr(), num_bytes) != 0:
            raise RuntimeError(f"{num_bytes} bytes cannot be registered; Mooncake says why on stderr")
        self._slots[slot.data_ptr()] = slot
        self._wanted.add(slot.data_ptr())
        return slot

    def free(self, slot: torch.Tensor) -> None:
        """Let a slot go. They all stay until the last one goes, which ends the engine."""
        with self._lock:
            self._wanted.discard(slot.data_ptr())
            if not self._wanted:
                self.closed = True
                self._end()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let the engine last for as long as this thread needs it."""
        with self._lock:
            if self.closed:
                raise RuntimeError("the engine is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                self._end()

    def _end(self) -> None:
        """End what still moves, and then let the memory go, once nobody is inside."""
        if self.closed and not self._inside and self._library is not None:
            for address in self._slots:
                self._library.unregister_memory(address)
            self._library = None
            self._slots.clear()

    def read(self, session: str, address: int, into: torch.Tensor) -> int:
        """Begin to read from a peer's memory. The first time, this waits for the peer's engine: at most a minute."""
        batch = self._use().batch_transfer_async_read(session, [into.data_ptr()], [address], [into.numel()])
        if batch in _UNREACHED:
            raise RuntimeError(f"the engine at {session} cannot be reached")
        return batch

    def done(self, batch: int) -> bool | None:
        """Return True once everything is there. Raises when it will not come."""
        state = self._use().transfer_check_status(batch)
        if state < 0:
            raise RuntimeError("the transfer failed")
        return True if state else None


class _Serving:
    """The parent's end: its engine answers by itself."""

    address: Mapping[str, str] = {}

    def open(self, deadline: Deadline) -> None:
        """Nothing."""

    def push(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Nothing: the child fetches it."""

    def cut(self) -> None:
        """Nothing blocks."""

    def close(self) -> None:
        """Nothing is held."""


class _Fetching:
    """The child's end."""

    def __init__(self, medium: MooncakeMedium, clock: Clock) -> None:
        self._medium = medium
        self._polling = Polling(clock)

    def open(self, deadline: Deadline) -> None:
        """Nothing: the first bucket connects."""

    def pull(self, place: Mapping[str, str], slot: int, into: torch.Tensor, deadline: Deadline) -> None:
        """Fetch a bucket."""
        if not into.numel():
            return
        engine, address = self._medium.engine, int(place["slots"].split()[slot])
        with engine.inside():
            batch = engine.read(place["session"], address, into)
            self._polling.until(lambda: engine.done(batch), deadline)

    def cut(self) -> None:
        """Make what blocks raise soon."""
        self._polling.cut()

    def close(self) -> None:
        """Nothing is held."""


class MooncakeMedium:
    """Memory of this process, and the engine that has it."""

    def __init__(self) -> None:
        self._engine: _Engine | None = None

    @property
    def engine(self) -> _Engine:
        """The one that has the slots."""
        if self._engine is None:
            raise RuntimeError("there is no engine without slots")
        return self._engine

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory that peers may read."""
        if self._engine is None or self._engine.closed:
            self._engine = _Engine()
        return self._engine.allocate(num_bytes)

    def free(self, memory: torch.Tensor) -> None:
        """Let it go, when nothing else is in use."""
        self.engine.free(memory)

    def place(self, slots: Sequence[torch.Tensor]) -> Mapping[str, str]:
        """Return where a child reads."""
        return {"session": self.engine.session, "slots": " ".join(str(slot.data_ptr()) for slot in slots)}

    def outlet(self, host: str, clock: Clock) -> Outlet:
        """Make the parent's end."""
        return _Serving()

    def inlet(self, host: str, address: Mapping[str, str], clock: Clock) -> Inlet:
        """Make the child's end."""
        return _Fetching(self, clock)

    def close(self) -> None:
        """Nothing is held beside the slots."""


class MooncakeSender(StreamSender):
    """One trainer rank."""

    medium = MooncakeMedium


class MooncakeReceiver(StreamReceiver):
    """One engine rank."""

    medium = MooncakeMedium


class MooncakeBackend:
    """Moves weights between processes and hosts, over RDMA where there is some."""

    sender_class: ClassVar[type[WeightSender]] = MooncakeSender
    receiver_class: ClassVar[type[WeightReceiver]] = MooncakeReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = TreePlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WireFormat(format_id="verl-buckets", version=1),)


if TYPE_CHECKING:

    def _is_backend(x: MooncakeBackend) -> WeightBackend:
        return x

    def _is_medium(x: MooncakeMedium) -> Medium:
        return x
