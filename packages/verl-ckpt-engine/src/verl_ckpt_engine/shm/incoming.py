"""One receive under way: the place in the ring, the place in the manifest, the counts.

Owns the checks between the stream and the engine: every record against the manifest, every payload against its digest
before it is loaded, all counts at the end. A stream that stops is an error with counts, never a shorter model.
"""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl_ckpt_engine.digest import combined_digest, payload_hasher
from verl_ckpt_engine.shm.frames import DATA_FRAME, END_FRAME, decode_end, decode_table
from verl_ckpt_engine.shm.segment import (
    ENDED,
    FAILED,
    READER_DONE,
    READER_FAILED,
    READER_JOINED,
    READY,
    Segment,
)
from verl_ckpt_engine.shm.waiting import poll
from verl_contracts.errors import ConfigError, StateError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_ckpt_engine.shm.frames import Record
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import LoadReport, Plan, TensorMeta

__all__ = ["IncomingStream"]


class IncomingStream:
    """Reads one plan's tensors from a segment: `enter`, then `items`, `check_load` and `finish`; `fail` at any time."""

    def __init__(
        self, plan: Plan, reader: int, clock: Clock, deadline: Deadline, aborted: Callable[[], str | None]
    ) -> None:
        self._plan = plan
        self._reader = reader
        self._clock = clock
        self._deadline = deadline
        self._aborted = aborted
        self._segment: Segment | None = None
        self._joined = False
        self._over = False
        self._ended = False
        self._pieces: tuple[PayloadHasher, int] | None = None
        self._scratch: mmap.mmap | None = None
        self.tensors = 0
        self.num_bytes = 0
        self.digests: dict[str, int] = {}

    def enter(self) -> None:
        """Open the file, wait until the sender has laid out the ring, and say that we read."""
        path = Path(self._plan.senders[0].address["segment"])
        try:
            self._segment = segment = Segment.open(path)
        except FileNotFoundError as exc:
            raise self.error("the sender has closed, or went on without us: its ring is gone") from exc
        segment.set_reader_state(self._reader, READER_JOINED)
        self._joined = True
        self._wait(lambda: segment.state in (READY, ENDED))
        geometry = segment.attach()
        if geometry.readers != len(self._plan.receivers):
            raise self.error(f"the ring is for {geometry.readers} readers, the plan for {len(self._plan.receivers)}")

    def items(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor as a view of the ring, valid until the next; check everything on the way."""
        segment = self._opened()
        sequence = 0
        while True:
            self._wait(lambda: segment.head > sequence)  # noqa: B023 - polled before `sequence` changes
            frame = segment.read_frame(sequence)
            self._check_kept(segment)
            if frame.sequence != sequence:
                raise self.error(f"frame {frame.sequence} lies where frame {sequence} was expected")
            if frame.kind == END_FRAME:
                self._check_end(frame.table)
                return
            if frame.kind != DATA_FRAME:
                raise self.error(f"frame {sequence} is of unknown kind {frame.kind}")
            for record in decode_table(frame.table):
                if record.at + record.num_bytes > frame.payload_bytes:
                    raise self.error(f"{record} points past the {frame.payload_bytes} bytes of frame {sequence}")
                yield from self._take(segment, record, frame.payload_at)
                self._check_kept(segment)
            sequence += 1
            segment.set_cursor(self._reader, sequence)

    def check_load(self, load: LoadReport) -> None:
        """Raise unless the target took the whole stream and accounts for every name."""
        expected = [meta.name for meta in self._plan.manifest.tensors]
        if not self._ended:
            raise self.error(f"the engine stopped taking tensors after {self._counts()}")
        missing = sorted(set(expected) - set(load.loaded) - set(load.skipped))
        if missing:
            raise WeightSyncError(
                "transfer", f"the engine neither loaded nor skipped {_some(missing)} of {len(expected)} tensors"
            )

    def finish(self) -> None:
        """Tell the sender that everything is loaded."""
        segment = self._opened()
        self._check_kept(segment)
        segment.set_reader_state(self._reader, READER_DONE)
        self._over = True

    def fail(self, reason: str) -> None:
        """Tell the sender that this reader is lost, unless it is done. Idempotent."""
        if self._joined and not self._over and self._segment is not None:
            self._segment.set_reader_words(self._reader, reason)
            self._segment.set_reader_state(self._reader, READER_FAILED)
            self._over = True

    def close(self) -> None:
        """Let go of the ring."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def error(self, reason: str, missing: Sequence[str] = ()) -> WeightSyncError:
        """Return the error that says where the stream stands."""
        expected = self._plan.manifest.tensors
        tensor = expected[self.tensors].name if self.tensors < len(expected) else None
        return WeightSyncError("transfer", reason, tensor, missing)

    def _opened(self) -> Segment:
        if self._segment is None:
            raise StateError("the receiver was closed while it received")
        return self._segment

    def _counts(self) -> str:
        manifest = self._plan.manifest
        return f"{self.tensors} of {len(manifest.tensors)} tensors, {self.num_bytes} of {manifest.num_bytes} bytes"

    def _take(self, segment: Segment, record: Record, payload_at: int) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield the tensor that `record` completes, if it does."""
        meta = self._expect(record)
        dtype = _dtype(meta)
        start = payload_at + record.at
        piece = segment.bytes[start : start + record.num_bytes]
        total = math.prod(meta.shape) * dtype.itemsize
        if record.num_bytes == total:
            hasher, whole = payload_hasher(), segment.tensor[start : start + total]
            hasher.update(piece)
        else:
            hasher, done = self._pieces or (payload_hasher(), 0)
            if record.offset != done or done + record.num_bytes > total:
                raise self.error(f"bytes from {record.offset} arrive where {done} of {total} are there")
            hasher.update(piece)
            if self._scratch is None or len(self._scratch) < total:
                self._scratch = _scratch(total)
            memoryview(self._scratch)[done : done + record.num_bytes] = piece
            done += record.num_bytes
            self._pieces = (hasher, done) if done < total else None
            if done < total:
                return
            whole = torch.frombuffer(self._scratch, dtype=torch.uint8, count=total)
        digest = hasher.intdigest()
        if digest != record.digest:
            raise self.error(f"the payload was changed on the way: digest {digest:#x}, sent {record.digest}")
        yield meta, (whole.view(dtype) if total else torch.empty(0, dtype=dtype)).view(meta.shape)
        self.tensors += 1
        self.num_bytes += total
        self.digests[meta.name] = digest

    def _expect(self, record: Record) -> TensorMeta:
        expected = self._plan.manifest.tensors
        if self.tensors >= len(expected):
            raise self.error(f"{record.name!r} arrives after the {len(expected)} tensors of the manifest")
        meta = expected[self.tensors]
        if (record.name, record.dtype, record.shape) != (meta.name, meta.dtype, meta.shape):
            raise self.error(
                f"{record.name} {record.shape} {record.dtype} arrives where the manifest says "
                f"{meta.name} {meta.shape} {meta.dtype}"
            )
        return meta

    def _check_end(self, table: bytes) -> None:
        end = decode_end(table)
        manifest = self._plan.manifest
        if self._pieces is not None or self.tensors != len(manifest.tensors) or self.num_bytes != manifest.num_bytes:
            raise self.error(f"the stream was cut: it ended after {self._counts()}")
        if (end.tensors, end.num_bytes) != (self.tensors, self.num_bytes):
            raise self.error(f"the sender counts {end.tensors} tensors, {end.num_bytes} bytes; here {self._counts()}")
        if end.digest != combined_digest(manifest, self.digests):
            raise self.error("the digest over all tensors differs from the sender's")
        self._ended = True

    def _check_kept(self, segment: Segment) -> None:
        """Raise when we were aborted or dropped: the sender drops before it writes over what we may still read."""
        reason = self._aborted()
        if reason is not None:
            raise self.error(f"aborted: {reason}")
        if segment.dropped(self._reader):
            raise self.error(f"the sender went on without us after {self._counts()}")

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for the sender. Raises when it failed, died or dropped us, on abort, and at the deadline."""
        segment = self._opened()
        sender = self._plan.senders[0]

        def check() -> None:
            self._check_kept(segment)
            if segment.state == FAILED:
                raise self.error(f"the sender failed after {self._counts()}: {segment.sender_words()}")
            if not self._deadline.remaining(self._clock):
                reason = f"nothing more came within {self._deadline.limit_s:.3g} s; have {self._counts()}"
                raise self.error(reason, missing=[f"{sender.owner} rank {sender.rank}"])

        def check_peers() -> None:
            if not segment.owner.alive() and not ready():
                reason = f"the sender's process {segment.owner.pid} is dead; have {self._counts()}"
                raise self.error(reason, missing=[f"{sender.owner} rank {sender.rank}"])

        poll(ready, check, check_peers)


def _dtype(meta: TensorMeta) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"tensor {meta.name!r} has dtype {meta.dtype!r}, which torch {torch.__version__} lacks")
    return dtype


def _scratch(num_bytes: int) -> mmap.mmap:
    """Return private memory in huge pages where there are some: its first use is then five times cheaper."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
