"""A rank of the tree that loads what it gets, and hands it on to its children.

One that fails to load still hands on: a broken engine costs its own replica, and not those below it.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import TYPE_CHECKING

import torch

from verl_ckpt_engine.copying import bytes_of
from verl_ckpt_engine.stream.frames import SLOTS, Frame, Record
from verl_ckpt_engine.stream.lines import END, FRAME
from verl_ckpt_engine.stream.role import Role, slot_bytes
from verl_ckpt_engine.stream.routes import children_of_receiver, parent_of
from verl_ckpt_engine.tally import ReceivedTally, dtype_of, size_of
from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from verl_ckpt_engine.stream.node import Node
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import EndpointInfo, Plan, TensorMeta, TransferReport, WeightReceiver, WeightTarget

__all__ = ["StreamReceiver"]

_log = logging.getLogger(__name__)


class StreamReceiver(Role):
    """One engine rank. Keep it for all syncs: a new one has to connect again."""

    def __init__(self, *, owner: str, clock: Clock) -> None:
        super().__init__(owner=owner, rank=0, clock=clock)

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Say where children find us."""
        self._rank = rank
        return self._prepare(session)

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole stream. Raises `WeightSyncError` for a cut, corrupt or incomplete one."""
        session = self._begin(plan)
        begun = self._clock.now()
        node, tally = session.node, ReceivedTally(plan)
        failure: str | None = "interrupted"
        try:
            place = self._place(plan)
            node.begin(plan, children_of_receiver(plan, place), deadline, slot_bytes=slot_bytes(plan))
            stream = _Incoming(node, tally, self._connect(node, plan, place))
            try:
                load = target.load(stream.items())
                tally.check_load(load)
            except Exception as exc:
                stream.hand_on(exc)
                raise
            stream.finish()
            failure = None
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else tally.error(f"{type(exc).__name__}: {exc}")
            failure = str(error)
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        finally:
            self._end(session, failure)
        return tally.report(self._owner, self._rank, self._clock.now() - begun, load.skipped)

    def _place(self, plan: Plan) -> int:
        names = [(endpoint.owner, endpoint.rank) for endpoint in plan.receivers]
        if (self._owner, self._rank) not in names:
            raise WeightSyncError("transfer", f"{self._owner} rank {self._rank} is not in the plan")
        return names.index((self._owner, self._rank))

    def _connect(self, node: Node, plan: Plan, place: int) -> dict[str, str]:
        return node.connect(parent_of(plan, place), self._owner, self._rank, plan.session)


class _Incoming:
    """One receive under way."""

    def __init__(self, node: Node, tally: ReceivedTally, place: dict[str, str]) -> None:
        self._node = node
        self._tally = tally
        self._place = place
        self._pulls: deque[tuple[Frame, Future[None]]] = deque()
        self._loaded = -1
        """Last bucket that the engine has."""
        self._given = -1
        """Last bucket that the engine was given something of."""
        self._staging: torch.Tensor | None = None
        self._end: bytes | None = None
        self._joined = False

    def items(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor, valid until the next; check everything on the way."""
        for frame in self._frames():
            slot = self._node.slots[frame.slot]
            data = bytes_of(slot[: frame.num_bytes])
            for record in frame.records:
                self._look_ahead()
                found = self._take(slot, data, record)
                if found is not None:
                    meta, tensor = found
                    yield meta, tensor
                    self._node.check(())
                    self._tally.add(meta, record.digest)
            self._loaded = frame.sequence
        said = json.loads(self._end or b"{}")
        self._tally.check_end(int(said["tensors"]), int(said["num_bytes"]), str(said["digest"]))

    def finish(self) -> None:
        """Wait for those below, and tell the one above."""
        self._join()
        self._node.end(self._end or b"")
        self._node.check(())
        self._node.done()

    def hand_on(self, exc: Exception) -> None:
        """Give those below what is still to come, for what went wrong here is not theirs."""
        if not self._node.children:
            return
        _log.warning("loading failed, the stream is handed on: %s", exc)
        self._loaded = self._given
        try:
            for frame in self._frames():
                self._loaded = frame.sequence
            self.finish()
        except WeightSyncError as later:
            _log.warning("handing the stream on ended: %s", later)

    def _frames(self) -> Iterator[Frame]:
        """Yield each bucket when it is in its slot, and the children know of it."""
        while True:
            self._look_ahead()
            while not self._pulls:
                if self._end is not None:
                    return
                self._hear()
            frame, pull = self._pulls.popleft()
            self._node.settle(pull)
            self._node.acknowledge(frame.sequence)
            self._join()
            self._node.announce(frame)
            self._given = frame.sequence
            yield frame

    def _hear(self) -> None:
        message = self._node.wait_message()
        if message.kind == FRAME:
            self._fetch(Frame.decode(message.body))
        elif message.kind == END:
            self._end = message.body
        else:
            self._node.check(())
            raise self._tally.error(f"a message of kind {message.kind} came within the stream")

    def _look_ahead(self) -> None:
        """Begin to fetch the next bucket while the engine loads this one, if there is room."""
        self._node.pump()
        while len(self._pulls) < SLOTS - 1 and (frame := self._node.next_frame()) is not None:
            self._fetch(frame)

    def _fetch(self, frame: Frame) -> None:
        last = frame.sequence - SLOTS
        if self._loaded < last:
            raise self._tally.error(f"bucket {frame.sequence} came before bucket {last} was taken")
        self._node.wait_free(last)
        if frame.num_bytes > self._node.slots[frame.slot].numel():
            raise self._tally.error(f"a bucket of {frame.num_bytes} bytes came")
        self._pulls.append((frame, self._node.pull(self._place, frame)))

    def _join(self) -> None:
        if not self._joined:
            self._joined = True
            self._node.wait_joined()

    def _take(self, slot: torch.Tensor, data: memoryview, record: Record) -> tuple[TensorMeta, torch.Tensor] | None:
        """Check and hash what `record` points at; return the tensor if that completes it."""
        meta = self._tally.piece(record.tensor, record.offset, record.num_bytes)
        self._node.tensor = meta.name
        stop = record.at + record.num_bytes
        if stop > len(data):
            raise self._tally.error(f"{record} points past the {len(data)} bytes of its bucket")
        complete = self._tally.hash(meta, data[record.at : stop], record.digest)
        payload, total = slot[record.at : stop], size_of(meta)
        if record.num_bytes < total:
            if self._staging is None or self._staging.numel() < total:
                self._staging = torch.empty(total, dtype=torch.uint8, device=slot.device)
            self._staging[record.offset : record.offset + record.num_bytes].copy_(payload)
            payload = self._staging[:total]
        return (meta, payload.view(dtype_of(meta)).view(meta.shape)) if complete else None


if TYPE_CHECKING:

    def _is_receiver(x: StreamReceiver) -> WeightReceiver:
        return x
