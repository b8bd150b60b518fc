"""One rank in the tree: what comes from its parent goes into its slots, and from there to its children.

Owns the neighbours and the slots of one sync, and the one place where it waits for them. A child that fails, dies or
stalls is dropped, so that one broken replica does not keep the others from their weights. What a node holds is used
again by the next sync only after one that went well.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from verl_ckpt_engine.stream.edges import Edge, Wake
from verl_ckpt_engine.stream.frames import SLOTS, Frame
from verl_ckpt_engine.stream.lines import (
    ACK,
    DONE,
    END,
    FAIL,
    FRAME,
    HELLO,
    WELCOME,
    Line,
    Listener,
    own_host,
    wait,
)
from verl_ckpt_engine.tally import fingerprint
from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch

    from verl_ckpt_engine.stream.lines import Message
    from verl_ckpt_engine.stream.medium import Inlet, Medium, Outlet
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import EndpointInfo, Plan

__all__ = ["Node", "name_of"]

_log = logging.getLogger(__name__)

_PATIENCE: Final = 0.5
"""Share of the time limit after which a child that does not move is dropped, if another one does."""
_TICK_S: Final = 0.05
"""Longest until a wait looks at its limit, and whether it was stopped."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    name: str
    edge: Edge[Outlet] | None = None
    joined: bool = False
    acknowledged: int = -1
    """Last bucket that it has."""
    done: bool = False
    pushes: deque[tuple[int, Future[None]]] = field(default_factory=deque)

    def has(self, sequence: int) -> bool:
        """Return whether our slot of that bucket may be written over, as far as this child goes."""
        return self.acknowledged >= sequence and not (self.pushes and self.pushes[0][0] <= sequence)


class Node:
    """A rank's neighbours. Used by one thread, except `stop`."""

    def __init__(self, medium: Medium, clock: Clock) -> None:
        self.medium = medium
        self._clock = clock
        self._listener = Listener(own_host())
        self._wake = Wake()
        self._edges: dict[str, Edge[Outlet]] = {}
        """To children of this sync, or of the last one."""
        self._parent: Edge[Inlet] | None = None
        self._parent_address: dict[str, str] = {}
        self.address = dict(self._listener.address)
        self.slots: list[torch.Tensor] = []
        self.stopped: str | None = None
        """Why the sync is over, from another thread."""

    def begin(self, plan: Plan, children: Sequence[int], deadline: Deadline, *, slot_bytes: int) -> None:
        """Begin a sync with these receivers of the plan as children."""
        self._plan = plan
        self._deadline = deadline
        self._patience_s = deadline.remaining(self._clock) * _PATIENCE
        self._causes: dict[str, str] = {}
        self._inbox: deque[Message] = deque()
        self._parent_failure: str | None = None
        self._parent_name = ""
        self.tensor: str | None = None
        if any(slot.numel() < slot_bytes for slot in self.slots) or not self.slots:
            self._free_slots()
            self.slots = [self.medium.allocate(slot_bytes) for _ in range(SLOTS)]
        names = [name_of(plan.receivers[index]) for index in children]
        for gone in self._edges.keys() - set(names):
            self._edges.pop(gone).close()
        self._children = [_Child(name=name, edge=self._edges.get(name)) for name in names]

    @property
    def children(self) -> bool:
        """Whether anybody is left who gets something from us."""
        return bool(self._children)

    # To the children.

    def announce(self, frame: Frame) -> None:
        """Let the children have a bucket that lies in its slot."""
        body, data = frame.encode(), self.slots[frame.slot][: frame.num_bytes]
        for child in self._children:
            edge = child.edge
            if edge is not None:
                edge.line.send(FRAME, body)
                child.pushes.append((frame.sequence, edge.run(lambda edge=edge: edge.end.push(data, self._deadline))))  # type: ignore[misc]

    def wait_joined(self) -> None:
        """Wait until all children are there."""
        self._wait(lambda child: child.joined)

    def wait_free(self, sequence: int) -> None:
        """Wait until no child needs the bucket of that number any more."""
        self._wait(lambda child: child.has(sequence))

    def is_free(self, sequence: int) -> bool:
        """Return whether no child needs the bucket of that number any more."""
        return all(child.has(sequence) for child in self._children)

    def end(self, body: bytes) -> None:
        """Tell the children that this was all, and wait until they are done."""
        for child in self._children:
            if child.edge is not None:
                child.edge.line.send(END, body)
        self._wait(lambda child: child.done)

    def _wait(self, reached: Callable[[_Child], bool]) -> None:
        begun = self._clock.now()
        self.pump()
        while holders := [child for child in self._children if not reached(child)]:
            self.check([child.name for child in holders])
            if len(holders) < len(self._children) and self._clock.now() - begun > self._patience_s:
                for child in holders:
                    self._drop(child, f"it did not move for {self._patience_s:.3g} s")
            self._sleep()
            self.pump()

    # From the parent.

    def connect(self, parent: EndpointInfo, owner: str, rank: int, session: str) -> dict[str, str]:
        """Meet the parent; return where it says that its slots are."""
        self._parent_name = name_of(parent)
        address = {name: parent.address[name] for name in ("host", "port", "token")}
        hello = {"session": session, "owner": owner, "rank": str(rank), "token": address["token"]}
        fresh = self._parent is None or self._parent_address != address or bool(self._parent.line.receive())
        if self._parent is not None and (fresh or self._parent.line.broken is not None):
            self._parent.close()
            self._parent, fresh = None, True
        line = self._dial(address) if self._parent is None else self._parent.line
        try:
            line.send(HELLO, hello)
            welcome = self._welcome(line)
        except BaseException:
            line.close()
            raise
        if self._parent is None:
            inlet = self.medium.inlet(address["host"], welcome, self._clock)
            self._parent, self._parent_address = Edge(line, inlet, self._wake), address
            opening = self._parent.run(lambda: inlet.open(self._deadline))
            self.settle(opening)
        if welcome.get("fingerprint") != str(fingerprint(self._plan.manifest)):
            raise self._error(f"the manifest of {self._parent_name} is not that of our plan")
        return welcome

    def _dial(self, address: dict[str, str]) -> Line:
        try:
            return Line.connect(address["host"], int(address["port"]), self._deadline.remaining(self._clock))
        except OSError as exc:
            raise self._error(f"{self._parent_name} cannot be reached: {exc}", [self._parent_name]) from exc

    def _welcome(self, line: Line) -> dict[str, str]:
        while True:
            self.check([self._parent_name])
            messages = line.receive()
            if messages and messages[0].kind == WELCOME:
                self._inbox.extend(messages[1:])
                return messages[0].fields()
            if messages and messages[0].kind == FAIL:
                raise self._error(f"{self._parent_name} failed: {messages[0].body.decode(errors='replace')}")
            if messages or line.broken is not None:
                raise self._error(f"{self._parent_name} went away: {line.broken or 'it speaks otherwise'}")
            self._accept()
            self._sleep(line)

    def wait_message(self) -> Message:
        """Return the next message of the parent."""
        self.pump()
        while not self._inbox:
            self.check([self._parent_name])
            self._sleep()
            self.pump()
        return self._inbox.popleft()

    def next_frame(self) -> Frame | None:
        """Return a frame that has come and was not taken; None where there is none, or something else comes first."""
        if self._inbox and self._inbox[0].kind == FRAME:
            return Frame.decode(self._inbox.popleft().body)
        return None

    def pull(self, place: dict[str, str], frame: Frame) -> Future[None]:
        """Begin to fetch a bucket into its slot."""
        edge = self._need_parent()
        into = self.slots[frame.slot][: frame.num_bytes]
        return edge.run(lambda: edge.end.pull(place, frame.slot, into, self._deadline))

    def settle(self, future: Future[None]) -> None:
        """Wait for something that travels. Raises what went wrong."""
        while not future.done():
            self.check([self._parent_name])
            self._sleep()
            self.pump()
        if (exc := future.exception()) is not None:  # wait: it is done
            self.pump()
            self.check([self._parent_name])  # what the parent says of it is better
            raise self._error(f"the way from {self._parent_name} broke: {exc}", [self._parent_name]) from exc

    def acknowledge(self, sequence: int) -> None:
        """Tell the parent that the bucket is here."""
        self._need_parent().line.send(ACK, struct.pack("=Q", sequence))

    def done(self) -> None:
        """Tell the parent that everything is loaded, here and below, or lost there."""
        line = self._need_parent().line
        line.send(DONE)
        while line.unsent:
            self.check([self._parent_name])
            self._sleep()
            line.flush()

    def _need_parent(self) -> Edge[Inlet]:
        if self._parent is None:
            raise self._error("there is no parent")
        return self._parent

    # Both.

    def pump(self) -> None:
        """Take in what has come from all sides."""
        self._wake.clear()
        self._accept()
        for child in list(self._children):
            self._hear(child)
        if self._parent is not None:
            self._inbox.extend(self._parent.line.receive())
            for message in self._inbox:
                if message.kind == FAIL and self._parent_failure is None:
                    self._parent_failure = f"{self._parent_name} failed: {message.body.decode(errors='replace')}"
            if self._parent.line.broken is not None and self._parent_failure is None and not self._inbox:
                self._parent_failure = f"{self._parent_name} went away: {self._parent.line.broken}"

    def check(self, holders: Sequence[str]) -> None:
        """Raise when the sync must end, or took too long because of these."""
        if self.stopped is not None:
            raise self._error(self.stopped, holders)
        if self._parent_failure is not None:
            raise self._error(self._parent_failure, [self._parent_name] if "went away" in self._parent_failure else [])
        if not self._children and self._causes and not self._parent_name:
            first, cause = next(iter(self._causes.items()))
            raise self._error(f"no receiver is left; first {first}: {cause}", list(self._causes))
        if not self._deadline.remaining(self._clock):
            raise self._error(f"nothing moved on within {self._deadline.limit_s:.3g} s", holders)

    def stop(self, reason: str) -> None:
        """Make what waits raise. From any thread."""
        self.stopped = self.stopped or reason
        self._wake.set()

    def fail(self, reason: str) -> None:
        """Tell all neighbours that the sync is over, and give everything back. Idempotent."""
        said = reason.encode()[:4096]
        for line, given in self._listener.newcomers():
            del given
            line.send(FAIL, said)
            line.close()
        edges: list[Edge[Outlet] | Edge[Inlet]] = [*self._edges.values()]
        edges += [self._parent] if self._parent is not None else []
        for edge in edges:
            edge.line.send(FAIL, said)
        self.close()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._listener.close()
        for edge in self._edges.values():
            edge.close()
        self._edges.clear()
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        self._free_slots()
        self.medium.close()
        self._wake.close()

    def _free_slots(self) -> None:
        for slot in self.slots:
            self.medium.free(slot)
        self.slots = []

    def _error(self, reason: str, missing: Sequence[str] = ()) -> WeightSyncError:
        return WeightSyncError("transfer", reason, self.tensor, missing)

    def _sleep(self, *more: Line) -> None:
        lines = [edge.line for edge in self._edges.values()]
        lines += [self._parent.line] if self._parent is not None else []
        limit_s = min(_TICK_S, self._deadline.remaining(self._clock))
        wait([self._wake.source, *self._listener.sources(), *lines, *more], limit_s)

    def _accept(self) -> None:
        for line, said in self._listener.newcomers():
            name = f"{said.get('owner')} rank {said.get('rank')}"
            child = next((child for child in self._children if child.name == name), None)
            if child is None:
                line.send(FAIL, f"{name} is nobody's child here".encode())
                line.close()
                continue
            if child.edge is not None:
                child.edge.close()
            child.edge = self._edges[name] = Edge(
                line, self.medium.outlet(self.address["host"], self._clock), self._wake
            )
            self._join(child, said, fresh=True)

    def _join(self, child: _Child, said: dict[str, str], *, fresh: bool) -> None:
        edge = child.edge
        if edge is None or said.get("session") != self._plan.session:
            return  # left over from a sync that failed
        welcome = {"fingerprint": str(fingerprint(self._plan.manifest)), **self.medium.place(self.slots)}
        edge.line.send(WELCOME, {**edge.end.address, **welcome})
        if fresh:
            child.pushes.append((-1, edge.run(lambda: edge.end.open(self._deadline))))
        child.joined = True

    def _hear(self, child: _Child) -> None:
        edge = child.edge
        if edge is None:
            return
        while child.pushes and child.pushes[0][1].done():
            _, push = child.pushes.popleft()
            if not push.cancelled() and (exc := push.exception()) is not None:  # wait: it is done
                self._drop(child, f"the way to it broke: {exc}")
                return
        for message in edge.line.receive():
            if message.kind == HELLO:
                with suppress(ValueError):
                    self._join(child, message.fields(), fresh=False)
            elif message.kind == ACK:
                (child.acknowledged,) = struct.unpack("=Q", message.body)
            elif message.kind == DONE:
                child.done = True
            elif message.kind == FAIL and child.joined and not child.done:
                self._drop(child, message.body.decode(errors="replace"))
                return
        if edge.line.broken is not None and not child.done:
            if child.joined:
                self._drop(child, f"it went away: {edge.line.broken}")
            else:  # what was left of the last sync; it may come anew
                self._edges.pop(child.name).close()
                child.edge = None

    def _drop(self, child: _Child, cause: str) -> None:
        if child in self._children:
            self._children.remove(child)
            edge = self._edges.pop(child.name, None)
            if edge is not None:
                edge.line.send(FAIL, f"dropped: {cause}".encode())
                edge.close()
            self._causes[child.name] = cause
            _log.warning("the weight stream goes on without %s: %s", child.name, cause)


def name_of(endpoint: EndpointInfo) -> str:
    """Return how one rank is called in messages."""
    return f"{endpoint.owner} rank {endpoint.rank}"
