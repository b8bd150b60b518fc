"""The root of a tree: fills buckets with the source's tensors and lets the children have them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from verl_ckpt_engine.copying import bytes_of, copy_and_hash
from verl_ckpt_engine.stream.frames import SLOTS, Frame, Record
from verl_ckpt_engine.stream.role import ALIGNMENT, Role, slot_bytes
from verl_ckpt_engine.stream.routes import children_of_sender
from verl_ckpt_engine.tally import SentTally
from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_ckpt_engine.stream.node import Node
    from verl_contracts.clock import Deadline
    from verl_contracts.weights import (
        EndpointInfo,
        Manifest,
        Plan,
        TensorMeta,
        TransferReport,
        WeightSender,
        WeightSource,
    )

__all__ = ["StreamSender"]

_MOST_RECORDS: Final = 4096
"""Most tensors in one bucket."""


class StreamSender(Role):
    """One trainer rank. Each rank feeds a tree of its own; one without receivers only takes part in gathering."""

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Say where children find us."""
        return self._prepare(session)

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Stream everything. Raises `WeightSyncError` naming the missing peers, at the deadline at the latest."""
        session = self._begin(plan)
        begun = self._clock.now()
        node, tally = session.node, SentTally(plan)
        children = children_of_sender(plan, [sender.rank for sender in plan.senders].index(self._rank))
        items = source.tensors()
        failure: str | None = "interrupted"
        try:
            node.begin(plan, children, deadline, slot_bytes=slot_bytes(plan))
            node.check(())
            if children:
                self._stream(node, tally, items)
            else:
                for meta, _ in items:
                    node.tensor = meta.name
                    node.check(())
            failure = None
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else tally.error(f"{type(exc).__name__}: {exc}")
            failure = error.reason
            if len(plan.senders) > 1:
                # The other ranks gather until their iteration ends; leaving now would block them.
                for _ in items:
                    pass
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        finally:
            self._end(session, failure)
        return tally.report(self._owner, self._rank, self._clock.now() - begun)

    def _stream(self, node: Node, tally: SentTally, items: Iterator[tuple[TensorMeta, torch.Tensor]]) -> None:
        node.wait_joined()
        buckets = _Buckets(node, slot_bytes(tally.plan))
        for meta, tensor in items:
            node.tensor = meta.name
            node.check(())
            tally.check(meta, tensor)
            hasher = tally.hasher(meta)
            buckets.write(tally.tensors, meta, tensor.detach(), hasher)
            tally.add(meta, hasher)
        tally.check_end()
        node.tensor = None
        buckets.flush()
        end = {"tensors": tally.tensors, "num_bytes": tally.num_bytes, "digest": tally.digest()}
        node.end(json.dumps(end).encode())


class _Buckets:
    """The bucket that is being filled, and the order of buckets."""

    def __init__(self, node: Node, size: int) -> None:
        self._node = node
        self._size = size
        self._sequence = 0
        self._used = 0
        self._records: list[Record] = []
        self._open = False
        # A memoryview of each slot, where this process can have one.
        self._views = [bytes_of(slot) if slot.device.type == "cpu" else None for slot in node.slots]

    def write(self, index: int, meta: TensorMeta, tensor: torch.Tensor, hasher: PayloadHasher) -> None:
        """Append one tensor, in as many buckets as it takes."""
        num_bytes = tensor.numel() * tensor.element_size()
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > self._size and num_bytes <= self._size:
            self.flush()
            start = 0
        if len(self._records) == _MOST_RECORDS:
            self.flush()
        if num_bytes <= self._size:
            start = self._place(num_bytes)
            if num_bytes:
                self._fill(tensor, start, num_bytes, hasher)
            else:
                start = self._used  # a place of its own could lie past the end
            self._records.append(Record(index, 0, num_bytes, start, hasher.intdigest()))
            return
        flat, item, offset = tensor.reshape(-1), tensor.element_size(), 0
        while offset < num_bytes:
            start = self._place(0)
            room = min(self._size - start, num_bytes - offset) // item * item
            if room <= 0:
                self.flush()
                if self._size < item:
                    raise ValueError(f"a bucket of {self._size} bytes does not hold one element of {meta.name}")
                continue
            self._place(room)
            self._fill(flat[offset // item : (offset + room) // item], start, room, hasher)
            offset += room
            digest = hasher.intdigest() if offset == num_bytes else 0
            self._records.append(Record(index, offset - room, room, start, digest))

    def flush(self) -> None:
        """Let the children have the open bucket, if there is one."""
        if self._open:
            self._node.announce(Frame(sequence=self._sequence, num_bytes=self._used, records=tuple(self._records)))
            self._sequence += 1
            self._used, self._records, self._open = 0, [], False

    def _place(self, num_bytes: int) -> int:
        """Return where in the open bucket the next bytes go, and take the room."""
        if not self._open:
            self._node.wait_free(self._sequence - SLOTS)
            self._open = True
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if num_bytes:
            self._used = start + num_bytes
        return start

    def _fill(self, tensor: torch.Tensor, start: int, num_bytes: int, hasher: PayloadHasher) -> None:
        slot, stop = self._sequence % SLOTS, start + num_bytes
        view = self._views[slot]
        copy_and_hash(tensor, self._node.slots[slot][start:stop], None if view is None else view[start:stop], hasher)


if TYPE_CHECKING:

    def _is_sender(x: StreamSender) -> WeightSender:
        return x
