"""The `nixl` backend: buckets through NVIDIA's transfer library, by whatever way UCX finds between two ranks.

Owns one agent for each rank, which lives as long as its slots: memory is let go only when no agent can touch it.

A child asks for a bucket and says where it is to go, and the parent writes it there. Fetching would need fewer words;
but over TCP UCX has the parent answer, and ends the process when the child that asked is gone.

Agents have no thread of their own, for that would never rest. Who waits for a bucket keeps the agent going meanwhile.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import itertools
import mmap
import threading
import uuid
from collections import defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import torch

from verl_ckpt_engine.stream.polling import Polling
from verl_ckpt_engine.stream.receiver import StreamReceiver
from verl_ckpt_engine.stream.routes import TreePlanner
from verl_ckpt_engine.stream.sender import StreamSender
from verl_contracts.weights import WireFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from verl_ckpt_engine.stream.medium import Inlet, Medium, Outlet
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import TopologyPlanner, WeightBackend, WeightReceiver, WeightSender

__all__ = ["NixlBackend"]

T = TypeVar("T")


def _found() -> ModuleType:
    names = ("nixl", "nixl_cu13", "nixl_cu12")  # one library, depending on the wheel
    for name in names:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ModuleNotFoundError("the nixl backend needs NIXL: pip install 'verl-ckpt-engine[nixl]'", name=names[0])


_nixl = _found()


class _Transfer(Protocol):
    def release(self) -> None: ...


class _Library(Protocol):
    """What is used of the library's agents."""

    def register_memory(self, memory: torch.Tensor, /) -> object: ...
    def deregister_memory(self, registration: object, /) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes, /) -> bytes: ...
    def remove_remote_agent(self, name: bytes, /) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def send_notif(self, name: bytes, message: bytes, /) -> None: ...
    def get_xfer_descs(self, places: list[tuple[int, int, int]], memory_type: str, /) -> object: ...
    def initialize_xfer(
        self, operation: str, here: object, there: object, name: bytes, message: bytes, /
    ) -> _Transfer: ...
    def transfer(self, transfer: _Transfer, /) -> str: ...
    def check_xfer_state(self, transfer: _Transfer, /) -> str: ...


_retired: list[mmap.mmap] = []
"""Memory, emptied, that a parent may still write to by itself. Its addresses are never given to anybody else."""


class _Agent:
    """The library's agent, and the memory that it may touch. For any thread."""

    def __init__(self) -> None:
        config = _nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._library: _Library | None = _nixl.nixl_agent(uuid.uuid4().hex, config)
        self._lock = threading.RLock()  # garbage collection may close it in a thread that is inside
        self._slots: dict[int, tuple[mmap.mmap, object]] = {}
        """Address → the memory there, and its registration."""
        self._wanted: set[int] = set()
        """Addresses of those that were not freed."""
        self._peers: dict[str, tuple[bytes, int]] = {}
        """What a peer says of itself → its name, and how many edges go there."""
        self._transfers: dict[int, _Transfer] = {}
        self._numbers = itertools.count()
        self._heard: defaultdict[str, deque[str]] = defaultdict(deque)
        """Edge → what was said on it."""
        self._asked: set[str] = set()
        """Edges on which a bucket was asked for that did not come yet."""

    def _do(self, job: Callable[[_Library], T]) -> T:
        """Use the library. What it raises is told in words: its own errors would keep the agent alive."""
        with self._lock:
            if self._library is None:
                raise RuntimeError("the agent is closed")
            try:
                return job(self._library)
            except Exception as exc:
                words = f"{type(exc).__name__}: {exc}"
        raise RuntimeError(words)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory that peers may write to."""
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        slot = torch.frombuffer(memory, dtype=torch.uint8)
        registration = self._do(lambda library: library.register_memory(slot))
        self._slots[slot.data_ptr()] = (memory, registration)
        self._wanted.add(slot.data_ptr())
        return slot

    def free(self, slot: torch.Tensor) -> None:
        """Let a slot go. They all stay until the last one goes, which ends the agent."""
        with self._lock:
            self._wanted.discard(slot.data_ptr())
            if not self._wanted:
                self.close()

    @property
    def closed(self) -> bool:
        """Whether it can be used no more."""
        return self._library is None

    def close(self) -> None:
        """End what still moves, and then let the memory go. Idempotent."""
        with self._lock:
            library, self._library = self._library, None
            if library is None:
                return
            for transfer in self._transfers.values():
                with suppress(Exception):  # it cannot be cancelled; it ends with the agent
                    transfer.release()
            for name, _ in self._peers.values():
                with suppress(Exception):  # the peer is gone
                    library.remove_remote_agent(name)
            library.get_new_notifs()  # lets what was cancelled come to its end, before its memory is unknown
            for _, registration in self._slots.values():
                library.deregister_memory(registration)
            self._transfers.clear()
            del library
            if self._asked:
                for memory, _ in self._slots.values():
                    memory.madvise(mmap.MADV_DONTNEED)
                    _retired.append(memory)
            self._slots.clear()

    @property
    def metadata(self) -> str:
        """What peers need to know."""
        return base64.b64encode(self._do(lambda library: library.get_agent_metadata())).decode()

    def meet(self, peer: str) -> None:
        """Let an edge go to the peer that says this of itself."""
        with self._lock:
            name, edges = self._peers.get(peer, (b"", 0))
            if not edges:
                name = self._do(lambda library: library.add_remote_agent(base64.b64decode(peer)))
            self._peers[peer] = (name, edges + 1)

    def leave(self, peer: str) -> None:
        """Take a `meet` back."""
        with self._lock:
            name, edges = self._peers.pop(peer)
            if edges > 1:
                self._peers[peer] = (name, edges - 1)
            elif self._library is not None:
                self._do(lambda library: library.remove_remote_agent(name))

    def ask(self, peer: str, edge: str, number: int, into: torch.Tensor) -> None:
        """Ask for the next bucket."""
        self._asked.add(edge)
        message = f"{edge} {number} {into.data_ptr()} {self.metadata}".encode()
        self._do(lambda library: library.send_notif(self._peers[peer][0], message))

    def answered(self, edge: str, number: int) -> bool | None:
        """Return True once the bucket is there."""
        said = self.heard(edge)
        if said is not None and said != str(number):
            raise RuntimeError(f"bucket {number} was asked for, and {said} came")
        if said is not None:
            self._asked.discard(edge)
        return True if said is not None else None

    def heard(self, edge: str) -> str | None:
        """Return the next that was said on the edge. Lets everything move that waits."""
        with self._lock:
            for messages in self._do(lambda library: library.get_new_notifs()).values():
                for message in messages:
                    said_on, _, words = message.decode().partition(" ")
                    self._heard[said_on].append(words)
            return self._heard[edge].popleft() if self._heard[edge] else None

    def write(self, data: torch.Tensor, peer: str, address: int, message: str) -> int:
        """Begin to write to a peer's memory. It hears the message when everything is there."""
        number = next(self._numbers)

        def begin(library: _Library) -> None:
            here = library.get_xfer_descs([(data.data_ptr(), data.numel(), 0)], "DRAM")
            there = library.get_xfer_descs([(address, data.numel(), 0)], "DRAM")
            name, _ = self._peers[peer]
            self._transfers[number] = library.initialize_xfer("WRITE", here, there, name, message.encode())
            library.transfer(self._transfers[number])

        self._do(begin)
        return number

    def written(self, number: int) -> bool | None:
        """Return True once it is. Raises when it will not be. Lets everything move that waits."""
        state = self._do(lambda library: library.check_xfer_state(self._transfers[number]))
        if state == "ERR":
            raise RuntimeError("the transfer failed")
        return True if state == "DONE" else None

    def forget(self, number: int) -> None:
        """Be done with a transfer. One that is not over goes on as long as the agent does."""
        with self._lock:
            if number in self._transfers:
                with suppress(Exception):
                    self._transfers.pop(number).release()


class _End:
    """One end of an edge."""

    def __init__(self, medium: NixlMedium, edge: str, clock: Clock) -> None:
        self.address: Mapping[str, str] = {"edge": edge}
        self._medium = medium
        self._edge = edge
        self._polling = Polling(clock)
        self._number = 0
        """Of the last bucket."""
        self._met: tuple[_Agent, str] | None = None

    def open(self, deadline: Deadline) -> None:
        """Nothing: the first bucket that is asked for connects."""

    def pull(self, place: Mapping[str, str], slot: int, into: torch.Tensor, deadline: Deadline) -> None:
        """Ask the parent for a bucket, and wait for it."""
        if into.numel():
            agent, number = self._meet(place["agent"])
            agent.ask(place["agent"], self._edge, number, into)
            self._polling.until(lambda: agent.answered(self._edge, number), deadline)

    def push(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Write a bucket to where the child wants it, once it does."""
        if not data.numel():
            return
        agent = self._medium.agent
        asked = self._polling.until(lambda: agent.heard(self._edge), deadline)
        said, address, peer = asked.split()
        _, number = self._meet(peer)
        if said != str(number):
            raise RuntimeError(f"bucket {said} was asked for, and {number} is next")
        transfer = agent.write(data, peer, int(address), f"{self._edge} {number}")
        try:
            self._polling.until(lambda: agent.written(transfer), deadline)
        finally:
            agent.forget(transfer)

    def _meet(self, peer: str) -> tuple[_Agent, int]:
        """Return our agent, which knows the peer now, and the number of the next bucket."""
        agent = self._medium.agent
        if self._met != (agent, peer):
            self._leave()
            agent.meet(peer)
            self._met = (agent, peer)
        self._number += 1
        return agent, self._number

    def _leave(self) -> None:
        if self._met is not None:
            (agent, peer), self._met = self._met, None
            agent.leave(peer)

    def cut(self) -> None:
        """Make what blocks raise soon."""
        self._polling.cut()

    def close(self) -> None:
        """Leave."""
        self._leave()


class NixlMedium:
    """Memory of this process, and the agent that has it."""

    def __init__(self) -> None:
        self.agent = _Agent()  # now, since the first of a process takes half a second

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory that peers may write to."""
        if self.agent.closed:
            self.agent = _Agent()
        return self.agent.allocate(num_bytes)

    def free(self, memory: torch.Tensor) -> None:
        """Let it go, when nothing else is in use."""
        self.agent.free(memory)

    def place(self, slots: Sequence[torch.Tensor]) -> Mapping[str, str]:
        """Return who it is that answers a child."""
        return {"agent": self.agent.metadata}

    def outlet(self, host: str, clock: Clock) -> Outlet:
        """Make the parent's end. Which interfaces are taken is up to UCX, and `UCX_NET_DEVICES`."""
        return _End(self, uuid.uuid4().hex, clock)

    def inlet(self, host: str, address: Mapping[str, str], clock: Clock) -> Inlet:
        """Make the child's end."""
        return _End(self, address["edge"], clock)

    def close(self) -> None:
        """End the agent, if that has no slots."""
        self.agent.close()


class NixlSender(StreamSender):
    """One trainer rank."""

    medium = NixlMedium


class NixlReceiver(StreamReceiver):
    """One engine rank."""

    medium = NixlMedium


class NixlBackend:
    """Moves weights between processes and hosts, over RDMA where there is some."""

    sender_class: ClassVar[type[WeightSender]] = NixlSender
    receiver_class: ClassVar[type[WeightReceiver]] = NixlReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = TreePlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WireFormat(format_id="verl-buckets", version=1),)


if TYPE_CHECKING:

    def _is_backend(x: NixlBackend) -> WeightBackend:
        return x

    def _is_medium(x: NixlMedium) -> Medium:
        return x
