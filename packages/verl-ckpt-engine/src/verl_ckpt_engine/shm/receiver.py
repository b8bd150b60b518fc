"""The reading side of the ring.

Owns the checks between the stream and the engine: every record against the manifest, every payload against its digest
before it is loaded, all counts at the end. A stream that stops is an error with counts, never a shorter model.
"""

from __future__ import annotations

import math
import socket
import threading
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
    remove_if_orphaned,
    segment_path,
)
from verl_ckpt_engine.shm.waiting import ProcessId, poll
from verl_contracts.errors import ConfigError, StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo, TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_ckpt_engine.shm.frames import Record
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import LoadReport, Plan, TensorMeta, WeightTarget

__all__ = ["ShmReceiver"]


class ShmReceiver:
    """One engine rank of the shm backend."""

    def __init__(self, *, owner: str, clock: Clock) -> None:
        """Make a receiver; create nothing yet."""
        self._owner = owner
        self._clock = clock
        self._rank = 0
        self._session: str | None = None
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._aborted: str | None = None

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Say which process will read. There is nothing to create: the file is the sender's."""
        self.close()
        self._session, self._rank, self._aborted = session, rank, None
        address = {"process": str(ProcessId.of_this_process())}
        return EndpointInfo(owner=self._owner, rank=rank, node=socket.gethostname(), address=address)

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole stream. Raises `WeightSyncError` for a cut, corrupt or incomplete one."""
        if self._session != plan.session:
            raise StateError(f"receive for session {plan.session!r}, but {self._session!r} was prepared")
        begun = self._clock.now()
        stream = _Stream(self, plan, self._clock, deadline)
        self._stream = stream
        try:
            stream.join()
            load = target.load(stream.items())
            stream.check_load(load)
            stream.finish()
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else stream.error(f"{type(exc).__name__}: {exc}")
            self._leave(str(error))
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        return TransferReport(
            owner=self._owner,
            rank=self._rank,
            tensors=stream.tensors,
            num_bytes=stream.num_bytes,
            seconds=self._clock.now() - begun,
            digests=stream.digests,
            skipped=load.skipped,
        )

    def abort(self, reason: str, /) -> None:
        """Make a blocked `receive` raise, and tell the sender."""
        self._aborted = reason
        self._leave(f"aborted: {reason}")

    def close(self) -> None:
        """Let go of the ring, and remove its file if the sender is dead. Idempotent, legal in every state."""
        self._leave("the receiver closed before the end")
        with self._lock:
            stream, self._stream = self._stream, None
            session, self._session = self._session, None
        if stream is not None:
            stream.close()
        if session is not None:
            remove_if_orphaned(segment_path(session))

    def aborted(self) -> str | None:
        """Return the reason given to `abort`, if any, since the last `prepare`."""
        return self._aborted

    def place(self, plan: Plan) -> int:
        """Return the index of this rank in `plan`."""
        for index, receiver in enumerate(plan.receivers):
            if (receiver.owner, receiver.rank) == (self._owner, self._rank):
                return index
        raise WeightSyncError("transfer", f"{self._owner} rank {self._rank} is not in the plan")

    def _leave(self, reason: str) -> None:
        """Tell the sender that this rank is lost, also when it does not know its place in the ring yet."""
        with self._lock:
            if self._stream is not None:
                self._stream.fail(reason)
            elif self._session is not None:
                with suppress(OSError, ValueError):
                    segment = Segment.open(segment_path(self._session))
                    segment.depart(f"{self._owner} rank {self._rank}")
                    segment.close()


class _Stream:
    """One receive under way: the place in the ring, the place in the manifest, the counts."""

    def __init__(self, receiver: ShmReceiver, plan: Plan, clock: Clock, deadline: Deadline) -> None:
        self._receiver = receiver
        self._plan = plan
        self._clock = clock
        self._deadline = deadline
        self._reader = receiver.place(plan)
        self._segment: Segment | None = None
        self._joined = False
        self._over = False
        self._ended = False
        self._pieces: tuple[PayloadHasher, int] | None = None
        self._scratch = bytearray()
        self.tensors = 0
        self.num_bytes = 0
        self.digests: dict[str, int] = {}

    def join(self) -> None:
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
            if len(self._scratch) < total:
                self._scratch = bytearray(total)
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
        """Raise when the sender dropped us. It says so before it writes over what we may still be reading."""
        if segment.dropped(self._reader):
            raise self.error(f"the sender went on without us after {self._counts()}")

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for the sender. Raises when it failed, died or dropped us, on abort, and at the deadline."""
        segment = self._opened()
        sender = self._plan.senders[0]

        def check() -> None:
            reason = self._receiver.aborted()
            if reason is not None:
                raise self.error(f"aborted: {reason}")
            if segment.state == FAILED:
                raise self.error(f"the sender failed after {self._counts()}: {segment.sender_words()}")
            self._check_kept(segment)
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
