"""One receive under way: the place in the ring, the place in the manifest, the counts.

Owns the checks between the stream and the engine: every record against the manifest, every payload against its digest
before it is loaded, all counts at the end. A stream that stops is an error with counts, never a shorter model.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.frames import DATA_FRAME, END_FRAME, decode_end
from verl_ckpt_engine.shm.ring import ENDED, FAILED, READY, Ring
from verl_ckpt_engine.shm.waiting import ProcessId, poll
from verl_ckpt_engine.tally import ReceivedTally, dtype_of, fingerprint, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from verl_ckpt_engine.shm.frames import Frame, Record
    from verl_ckpt_engine.shm.page import ReaderPage
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.errors import WeightSyncError
    from verl_contracts.weights import LoadReport, Plan, TensorMeta

__all__ = ["IncomingStream"]


class IncomingStream:
    """Reads one plan's tensors: `enter`, `items`, `check_load`, `finish`; `stop` at any time, from any thread."""

    def __init__(self, plan: Plan, reader: int, page: ReaderPage, clock: Clock, deadline: Deadline) -> None:
        sender = plan.senders[0]
        self._plan = plan
        self._reader = reader
        self._page = page
        self._clock = clock
        self._deadline = deadline
        self._sender = f"{sender.owner} rank {sender.rank}"
        self._process = ProcessId.parse(sender.address["process"])
        self._generation = int(sender.address["generation"])
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._over = False
        self._begins: int | None = None
        """Where in the ring a tensor begins that is here in part."""
        self.tally = ReceivedTally(plan)

    def enter(self, known: Ring | None) -> Ring:
        """Return the ring, mapped as a whole, once the sender has laid it out; `known` may be the one."""
        address = self._plan.senders[0].address
        if known is None or not known.memory.is_at(address):
            known = self._map()
        ring = known
        self._wait(ring, lambda: ring.state in (READY, ENDED))
        if ring.total_bytes > len(ring.memory):
            ring = self._map()
        self._check_kept(ring)
        if ring.readers != len(self._plan.receivers):
            raise self.error(f"the ring is for {ring.readers} readers, the plan for {len(self._plan.receivers)}")
        if ring.fingerprint != fingerprint(self._plan.manifest):
            raise self.error(f"the sender's manifest of version {self._plan.version} is not the one of our plan")
        return ring

    def items(self, ring: Ring) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor as a view of the ring, valid until the next; check everything on the way."""
        for sequence in self._frames(ring):
            frame = ring.read_frame(sequence)
            self._check_frame(ring, frame, sequence)
            if frame.kind == END_FRAME:
                end = decode_end(frame.table)
                self.tally.check_end(end.tensors, end.num_bytes, end.digest)
                return
            for record in frame.records():
                meta, payload = self._take(ring, record)
                self._check_kept(ring)
                if payload is not None:
                    yield meta, payload
                    self._check_kept(ring)
                    self.tally.add(meta, record.digest)
            self._page.cursor = sequence + 1

    def check_load(self, load: LoadReport) -> None:
        """Raise unless the target took the whole stream and accounts for every name."""
        self.tally.check_load(load)

    def finish(self, ring: Ring) -> None:
        """Tell the sender that everything is loaded."""
        with self._lock:
            self._check_kept(ring)
            self._over = True
            self._page.done()

    def stop(self, reason: str) -> None:
        """Tell the sender that this reader is lost, unless it is done, and make a receive that still runs raise."""
        with self._lock:
            if not self._over:
                self._over = True
                self._stopped = reason
                self._page.fail(reason)

    def error(self, reason: str, missing: Sequence[str] = ()) -> WeightSyncError:
        """Return the error that says where the stream stands."""
        return self.tally.error(reason, missing)

    def _map(self) -> Ring:
        address = self._plan.senders[0].address
        try:
            return Ring.open(address)
        except OSError as exc:
            if not self._process.alive():
                raise self._dead() from exc
            raise self.error(
                f"the memory of {self._sender} is gone, for it closed or went on without us, or it is out of reach for "
                f"this process: {exc}"
            ) from exc

    def _dead(self) -> WeightSyncError:
        return self.error(f"the sender's process {self._process.pid} is dead; have {self._counts()}", [self._sender])

    def _counts(self) -> str:
        return self.tally.counts()

    def _frames(self, ring: Ring) -> Iterator[int]:
        """Yield the number of each frame when it is there."""
        sequence = 0
        while True:
            if ring.head <= sequence:
                self._wait(ring, lambda: ring.head > sequence)  # noqa: B023 - polled before `sequence` changes
            yield sequence
            sequence += 1

    def _check_frame(self, ring: Ring, frame: Frame, sequence: int) -> None:
        self._check_kept(ring)
        if (frame.generation, frame.sequence) != (self._generation, sequence):
            raise self.error(
                f"frame {frame.sequence} of sync {frame.generation} lies where frame {sequence} of sync "
                f"{self._generation} was expected"
            )
        if frame.kind not in (DATA_FRAME, END_FRAME):
            raise self.error(f"frame {sequence} is of unknown kind {frame.kind}")

    def _take(self, ring: Ring, record: Record) -> tuple[TensorMeta, torch.Tensor | None]:
        """Check and hash what `record` points at; return the tensor if that completes it."""
        meta = self.tally.piece(record.tensor, record.offset, record.num_bytes)
        total, first = size_of(meta), record.at - record.offset
        begins = first if self._begins is None else self._begins
        if first != begins:
            raise self.error(f"bytes from {record.offset} lie apart from those before them")
        if first < 0 or first + total > len(ring.memory):
            raise self.error(f"{record} points past the {len(ring.memory)} bytes of the ring")
        data = ring.memory.bytes[record.at : record.at + record.num_bytes]
        if not self.tally.hash(meta, data, record.digest):
            self._begins = begins
            return meta, None
        self._begins = None
        payload = ring.memory.tensor[begins : begins + total]
        return meta, payload.view(dtype_of(meta)).view(meta.shape)

    def _check_kept(self, ring: Ring) -> None:
        """Raise when we were stopped or dropped: the sender drops before it writes over what we may still read."""
        if self._stopped is not None:
            raise self.error(self._stopped)
        if ring.generation != self._generation or ring.dropped(self._reader, self._generation):
            raise self.error(f"the sender went on without us after {self._counts()}")

    def _wait(self, ring: Ring, ready: Callable[[], bool]) -> None:
        """Wait for the sender, as long as it lives and there is time."""

        def check() -> None:
            self._check_kept(ring)
            if ring.state == FAILED:
                raise self.error(f"the sender failed after {self._counts()}: {ring.message}")
            if not self._deadline.remaining(self._clock):
                reason = f"nothing more came within {self._deadline.limit_s:.3g} s; have {self._counts()}"
                raise self.error(reason, [self._sender])

        def check_peers() -> None:
            if not self._process.alive() and not ready():
                raise self._dead()

        poll(ready, check, check_peers)
