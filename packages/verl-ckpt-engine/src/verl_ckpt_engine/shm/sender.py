"""The writing side of the ring.

Owns the order of frames and who is still listened to. A reader that failed, died or stalls is dropped, so that one
broken replica does not keep the others from their weights; only when nobody is left does the send fail.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING

import torch

from verl_ckpt_engine.digest import combined_digest, payload_hasher
from verl_ckpt_engine.shm.frames import (
    DATA_FRAME,
    END_FRAME,
    EndRecord,
    Record,
    aligned,
    encode_end,
    encode_record,
    encode_table,
)
from verl_ckpt_engine.shm.segment import (
    ENDED,
    FAILED,
    READER_DONE,
    READER_FAILED,
    READER_JOINED,
    Geometry,
    Segment,
    segment_path,
)
from verl_ckpt_engine.shm.waiting import ProcessId, poll
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo, TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Manifest, Plan, TensorMeta, WeightSender, WeightSource

__all__ = ["ShmSender"]

_log = logging.getLogger(__name__)

_FLUSH_BYTES = 1024 * 1024
"""Payload after which a frame is published although its slot could hold more: early frames overlap both sides."""
_PIECE_BYTES = 4 * 1024 * 1024
"""Size of the pieces of a tensor that fits in no slot; it must be put together anyway, so small ones stay in cache."""
_STEP_BYTES = 256 * 1024
"""Bytes copied before they are hashed, while the cache still holds them."""
_PATIENCE = 0.5
"""Share of the time limit after which a reader that does not move is dropped, if another one does."""


class ShmSender:
    """One trainer rank of the shm backend: rank 0 writes, the others only take part in gathering."""

    def __init__(self, *, owner: str, rank: int, clock: Clock) -> None:
        """Make a sender; create nothing yet."""
        self._owner = owner
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._manifest: Manifest | None = None
        self._aborted: str | None = None

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Create the file of this session; it gets its size once the plan is known."""
        self.close()
        process = ProcessId.of_this_process()
        self._aborted = None
        self._manifest = manifest
        address = {"process": str(process)}
        if self._rank == 0:
            self._segment = Segment.create(segment_path(session), process)
            address["segment"] = str(self._segment.path)
        return EndpointInfo(owner=self._owner, rank=self._rank, node=socket.gethostname(), address=address)

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Stream everything. Raises `WeightSyncError` naming the missing peers, at the deadline at the latest.

        Returns when every reader that is still listened to has said that it loaded everything.
        """
        if self._manifest is None:
            raise StateError("send before prepare: the session does not exist")
        begun = self._clock.now()
        if self._rank != 0:
            self._drain(source, deadline)
            return self._report(begun, tensors=0, num_bytes=0, digests={})
        segment = self._segment
        if segment is None:
            raise StateError("send after close: the session does not exist any more")
        stream = _Stream(segment, plan, self._clock, deadline, lambda: self._aborted)
        items = source.tensors()
        try:
            for meta, tensor in items:
                stream.write(meta, tensor)
            stream.end()
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else stream.error(f"{type(exc).__name__}: {exc}")
            self._fail(error.reason)
            if len(plan.senders) > 1:
                # The other ranks gather until their iteration ends; leaving now would block them.
                for _ in items:
                    pass
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        return self._report(begun, tensors=stream.tensors, num_bytes=stream.num_bytes, digests=stream.digests)

    def abort(self, reason: str, /) -> None:
        """Make a blocked `send` raise, and tell the receivers."""
        self._aborted = reason
        self._fail(f"aborted: {reason}")

    def close(self) -> None:
        """Remove the file. Idempotent, legal in every state; receivers that still read are told."""
        self._fail("the sender closed before the end")
        with self._lock:
            segment, self._segment, self._manifest = self._segment, None, None
            if segment is not None:
                segment.unlink()
                segment.close()

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._segment is not None and self._segment.state not in (ENDED, FAILED):
                self._segment.set_sender_words(reason)
                self._segment.state = FAILED

    def _drain(self, source: WeightSource, deadline: Deadline) -> None:
        for meta, _ in source.tensors():
            if self._aborted is not None:
                raise WeightSyncError("transfer", f"aborted: {self._aborted}", meta.name)
            if not deadline.remaining(self._clock):
                raise WeightSyncError("transfer", f"not gathered within {deadline.limit_s:.3g} s", meta.name)

    def _report(self, begun: float, *, tensors: int, num_bytes: int, digests: dict[str, int]) -> TransferReport:
        return TransferReport(
            owner=self._owner,
            rank=self._rank,
            tensors=tensors,
            num_bytes=num_bytes,
            seconds=self._clock.now() - begun,
            digests=digests,
        )


class _Stream:
    """One send under way: the open frame, the counts, and the readers still listened to."""

    def __init__(
        self, segment: Segment, plan: Plan, clock: Clock, deadline: Deadline, aborted: Callable[[], str | None]
    ) -> None:
        self._segment = segment
        self._plan = plan
        self._clock = clock
        self._deadline = deadline
        self._aborted = aborted
        self._tensor: str | None = None
        self._geometry = Geometry.choose(plan.manifest, readers=len(plan.receivers), bucket_bytes=plan.bucket_bytes)
        self._processes = [ProcessId.parse(receiver.address["process"]) for receiver in plan.receivers]
        self._live = set(range(len(plan.receivers)))
        self._causes: dict[int, str] = {}
        self._patience_s = deadline.remaining(clock) * _PATIENCE
        self._joined_all = False
        self._open = False
        self._used = 0
        self._records: list[bytes] = []
        self._table_used = 2
        self._populated = [0] * self._geometry.slots
        self.tensors = 0
        self.num_bytes = 0
        self.digests: dict[str, int] = {}
        segment.grow(self._geometry)

    def write(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Append one tensor to the stream."""
        self._tensor = meta.name
        self._check_against_manifest(meta, tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        hasher = payload_hasher()
        capacity = self._geometry.payload_bytes
        if num_bytes <= capacity:
            at = self._room(meta, num_bytes)
            _copy(self._segment, at, tensor, hasher)
            self._append(meta, offset=0, num_bytes=num_bytes, at=at, digest=hasher.intdigest())
        else:
            self._flush()
            flat = tensor.reshape(-1)
            step = min(capacity, _PIECE_BYTES) // tensor.element_size()
            for first in range(0, flat.numel(), step):
                piece = flat[first : first + step]
                offset, size = first * tensor.element_size(), piece.numel() * tensor.element_size()
                at = self._room(meta, size)
                _copy(self._segment, at, piece, hasher)
                last = offset + size == num_bytes
                self._append(meta, offset=offset, num_bytes=size, at=at, digest=hasher.intdigest() if last else None)
        self.tensors += 1
        self.num_bytes += num_bytes
        self.digests[meta.name] = hasher.intdigest()

    def end(self) -> None:
        """Publish the end and wait until everybody who is left has loaded everything."""
        expected = self._plan.manifest
        if self.tensors != len(expected.tensors) or self.num_bytes != expected.num_bytes:
            raise self.error(
                f"the source ended after {self.tensors} of {len(expected.tensors)} tensors, "
                f"{self.num_bytes} of {expected.num_bytes} bytes"
            )
        self._flush()
        self._tensor = None
        self._wait_for_slot()
        end = EndRecord(tensors=self.tensors, num_bytes=self.num_bytes, digest=combined_digest(expected, self.digests))
        self._segment.write_frame(self._segment.head, END_FRAME, encode_end(end), 0)
        self._wait(self._all_done, self._unfinished)
        self._segment.state = ENDED

    def error(self, reason: str, missing: list[int] | None = None) -> WeightSyncError:
        """Return the error that says where the stream stands."""
        return WeightSyncError("transfer", reason, self._tensor, [self._name(reader) for reader in missing or ()])

    def _name(self, reader: int) -> str:
        receiver = self._plan.receivers[reader]
        return f"{receiver.owner} rank {receiver.rank}"

    def _check_against_manifest(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        expected = self._plan.manifest.tensors
        if self.tensors >= len(expected):
            raise self.error(f"the source gives more than the {len(expected)} tensors of its manifest")
        wanted = expected[self.tensors]
        given = f"{meta.name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if given != f"{wanted.name} {wanted.shape} {wanted.dtype}" or meta != wanted:
            raise self.error(
                f"the source gives {given} where its manifest says {wanted.name} {wanted.shape} {wanted.dtype}"
            )

    def _room(self, meta: TensorMeta, num_bytes: int) -> int:
        """Return where in the file the next `num_bytes` go, in the open frame or a new one."""
        record_bytes = len(encode_record(_record(meta, offset=0, num_bytes=0, at=0, digest=None))) + 80
        start = aligned(self._used)
        full = (
            start + num_bytes > self._geometry.payload_bytes
            or self._table_used + record_bytes > self._geometry.table_bytes
            or self._used >= _FLUSH_BYTES
        )
        if full:
            self._flush()
            start = 0
        if not self._open:
            self._wait_for_slot()
            self._open = True
        slot = self._segment.head % self._geometry.slots
        base = self._segment.payload_at(self._segment.head)
        self._used = start + num_bytes
        if self._used > self._populated[slot]:
            stop = min(self._geometry.payload_bytes, max(self._used, _FLUSH_BYTES))
            self._segment.populate(base + self._populated[slot], base + stop)
            self._populated[slot] = stop
        return base + start

    def _append(self, meta: TensorMeta, *, offset: int, num_bytes: int, at: int, digest: int | None) -> None:
        start = at - self._segment.payload_at(self._segment.head)
        self._records.append(encode_record(_record(meta, offset=offset, num_bytes=num_bytes, at=start, digest=digest)))
        self._table_used += len(self._records[-1]) + 1

    def _flush(self) -> None:
        if self._open:
            self._segment.write_frame(self._segment.head, DATA_FRAME, encode_table(self._records), self._used)
        self._open, self._used, self._records, self._table_used = False, 0, [], 2

    def _wait_for_slot(self) -> None:
        oldest = self._segment.head - self._geometry.slots + 1
        if oldest > 0:
            self._wait(
                lambda: all(self._segment.cursor(reader) >= oldest for reader in self._live),
                lambda: [reader for reader in self._live if self._segment.cursor(reader) < oldest],
            )
        else:
            self._check([])
            self._look_at_readers()

    def _all_done(self) -> bool:
        return all(self._segment.reader_state(reader) == READER_DONE for reader in self._live)

    def _unfinished(self) -> list[int]:
        return [reader for reader in self._live if self._segment.reader_state(reader) != READER_DONE]

    def _wait(self, ready: Callable[[], bool], holders: Callable[[], list[int]]) -> None:
        """Wait for readers; drop the failed and the dead, and the stalled ones if others are better."""
        begun = self._clock.now()

        def check() -> None:
            self._check(holders())
            self._look_at_readers()

        def check_peers() -> None:
            for reader in sorted(self._live):
                if not self._processes[reader].alive():
                    self._drop(reader, f"process {self._processes[reader].pid} is dead")
            stalled = holders()
            if len(stalled) < len(self._live) and self._clock.now() - begun > self._patience_s:
                for reader in stalled:
                    self._drop(reader, f"it did not move for {self._patience_s:.3g} s")

        self._look_at_readers()
        poll(ready, check, check_peers)
        self._look_at_readers()

    def _check(self, holders: list[int]) -> None:
        reason = self._aborted()
        if reason is not None:
            raise self.error(f"aborted: {reason}", holders)
        if not self._deadline.remaining(self._clock):
            raise self.error(f"not taken within {self._deadline.limit_s:.3g} s", sorted(holders))

    def _look_at_readers(self) -> None:
        for reader in sorted(self._live):
            if self._segment.reader_state(reader) == READER_FAILED:
                self._drop(reader, self._segment.reader_words(reader))
        if not self._joined_all:
            self._joined_all = all(self._segment.reader_state(reader) >= READER_JOINED for reader in self._live)
            if self._joined_all:
                # Everybody has it mapped: without a name it cannot outlive us, whoever is killed.
                self._segment.unlink()

    def _drop(self, reader: int, cause: str) -> None:
        self._segment.drop(reader)
        self._live.discard(reader)
        self._causes[reader] = cause
        _log.warning("the weight stream goes on without %s: %s", self._name(reader), cause)
        if not self._live:
            first = next(iter(self._causes))
            raise self.error(
                f"no receiver is left; first {self._name(first)}: {self._causes[first]}", sorted(self._causes)
            )


def _record(meta: TensorMeta, *, offset: int, num_bytes: int, at: int, digest: int | None) -> Record:
    return Record(
        name=meta.name,
        dtype=meta.dtype,
        shape=meta.shape,
        offset=offset,
        num_bytes=num_bytes,
        at=at,
        digest=digest,
    )


def _copy(segment: Segment, at: int, tensor: torch.Tensor, hasher: PayloadHasher) -> None:
    """Copy `tensor` to byte `at` of the file and hash what arrived there."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return
    place = segment.tensor[at : at + num_bytes]
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        hasher.update(segment.bytes[at : at + num_bytes])
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    for first in range(0, num_bytes, _STEP_BYTES):
        stop = min(first + _STEP_BYTES, num_bytes)
        place[first:stop].copy_(flat[first:stop])
        hasher.update(segment.bytes[at + first : at + stop])


if TYPE_CHECKING:

    def _is_sender(x: ShmSender) -> WeightSender:
        return x
