"""One send under way: what lies in which area, the counts, and the readers still listened to.

Owns the order of frames and who is left. A reader that failed, died or stalls is dropped, so that one broken replica
does not keep the others from their weights; only when nobody is left does the send fail.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
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
    FRAMES,
    READER_ABSENT,
    READER_DONE,
    READER_FAILED,
    READER_JOINED,
    Geometry,
)
from verl_ckpt_engine.shm.waiting import ProcessId, poll
from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_ckpt_engine.shm.segment import Segment
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Plan, TensorMeta

__all__ = ["OutgoingStream"]

_log = logging.getLogger(__name__)

_FLUSH_BYTES = 1024 * 1024
"""Payload after which a frame is published although its slot could hold more: early frames overlap both sides."""
_STEP_BYTES = 512 * 1024
"""Bytes copied before they are hashed, while the cache still holds them."""
_PATIENCE = 0.5
"""Share of the time limit after which a reader that does not move is dropped, if another one does."""


@dataclass(slots=True, kw_only=True)
class _Area:
    """A place for payload."""

    at: int
    size: int
    free_from: int = 0
    """Cursor from which no reader needs it any more."""
    populated: int = 0

    def populate(self, used: int, segment: Segment) -> None:
        """Make sure that the first `used` bytes have memory."""
        if used > self.populated:
            stop = min(self.size, max(used, _FLUSH_BYTES))
            segment.populate(self.at + self.populated, self.at + stop)
            self.populated = stop


@dataclass(slots=True, kw_only=True)
class _Frame:
    """The frame that is being filled."""

    area: _Area | None = None
    used: int = 0
    records: list[bytes] = field(default_factory=list)
    table_bytes: int = 2

    @property
    def payload_at(self) -> int:
        """Where in the file its payload begins."""
        return self.area.at if self.area is not None else 0

    def append(self, record: bytes) -> None:
        """Add an encoded record to the table."""
        self.records.append(record)
        self.table_bytes += len(record) + 1


class OutgoingStream:
    """Writes one plan's tensors into a segment. `write` each in the order of the manifest, then `end`."""

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
        small, large = self._geometry.areas
        self._small = [_Area(at=at, size=self._geometry.small_bytes) for at in small]
        self._large = [_Area(at=at, size=self._geometry.large_bytes) for at in large]
        self._frame = _Frame()
        self.tensors = 0
        self.num_bytes = 0
        self.digests: dict[str, int] = {}
        segment.grow(self._geometry)

    def write(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Append one tensor to the stream."""
        self._tensor = meta.name
        self._check([])  # here too: with quick readers no wait below would ever look
        self._check_against_manifest(meta, tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        hasher = payload_hasher()
        flat = tensor
        step = max(1, tensor.numel())
        if num_bytes > max(self._geometry.small_bytes, self._geometry.large_bytes):
            # In pieces, through the small areas: the readers must put it together anyway.
            flat = tensor.reshape(-1)
            step = self._geometry.small_bytes // tensor.element_size()
        for first in range(0, max(1, tensor.numel()), step):
            piece = flat[first : first + step] if flat is not tensor else flat
            offset, size = first * tensor.element_size(), piece.numel() * tensor.element_size()
            at = self._room(meta, size)
            _copy(self._segment, at, piece, hasher)
            record = Record(
                name=meta.name,
                dtype=meta.dtype,
                shape=meta.shape,
                offset=offset,
                num_bytes=size,
                at=at - self._frame.payload_at,
                digest=hasher.intdigest() if offset + size == num_bytes else None,
            )
            self._frame.append(encode_record(record))
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
        self._check([])
        self._flush()
        self._tensor = None
        self._wait_for_cursor(self._segment.head - FRAMES + 1)
        end = EndRecord(tensors=self.tensors, num_bytes=self.num_bytes, digest=combined_digest(expected, self.digests))
        self._segment.write_frame(END_FRAME, encode_end(end), 0, 0)
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
        frame = self._frame
        start = aligned(frame.used)
        if frame.area is not None and (
            start + num_bytes > frame.area.size
            or frame.used >= _FLUSH_BYTES
            or frame.table_bytes + _most_table_bytes(meta) > self._geometry.table_bytes
        ):
            self._flush()
            frame, start = self._frame, 0
        if frame.area is None:
            areas = self._small if num_bytes <= self._geometry.small_bytes else self._large
            frame.area = areas[0]
            areas.append(areas.pop(0))
            self._wait_for_cursor(max(frame.area.free_from, self._segment.head - FRAMES + 1))
        frame.used = start + num_bytes
        frame.area.populate(frame.used, self._segment)
        return frame.area.at + start

    def _flush(self) -> None:
        """Publish the open frame, if there is one."""
        frame, self._frame = self._frame, _Frame()
        if frame.area is not None:
            self._segment.write_frame(DATA_FRAME, encode_table(frame.records), frame.payload_at, frame.used)
            frame.area.free_from = self._segment.head

    def _wait_for_cursor(self, cursor: int) -> None:
        """Wait until everybody is done with the frames before `cursor`."""
        self._wait(
            lambda: all(self._segment.cursor(reader) >= cursor for reader in self._live),
            lambda: [reader for reader in self._live if self._segment.cursor(reader) < cursor],
        )

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
            state = self._segment.reader_state(reader)
            if state == READER_FAILED:
                self._drop(reader, self._segment.reader_words(reader))
            elif state == READER_ABSENT and self._segment.departed(self._name(reader)):
                self._drop(reader, "it gave up before it joined")
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


def _most_table_bytes(meta: TensorMeta) -> int:
    """Return a bound on the size of one record of `meta`: four numbers of at most 20 digits, escapes, punctuation."""
    return 6 * len(meta.name) + 24 * len(meta.shape) + 160


def _copy(segment: Segment, at: int, tensor: torch.Tensor, hasher: PayloadHasher) -> None:
    """Copy `tensor` to byte `at` of the file and hash what arrived there."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        segment.tensor[at : at + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        hasher.update(segment.bytes[at : at + num_bytes])
        return
    # Plain memory copies: they take about two thirds of the time of torch's.
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for first in range(0, num_bytes, _STEP_BYTES):
        stop = min(first + _STEP_BYTES, num_bytes)
        segment.bytes[at + first : at + stop] = data[first:stop]
        hasher.update(segment.bytes[at + first : at + stop])
