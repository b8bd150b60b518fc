"""One send under way: what lies in which area, the counts, and the order of frames.

Owns what is written where, and when it may be written over. Who is still listened to is `audience`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ckpt_engine.copying import copy_and_hash
from verl_ckpt_engine.shm.audience import Audience
from verl_ckpt_engine.shm.frames import (
    DATA_FRAME,
    END_FRAME,
    MOST_RECORDS,
    EndRecord,
    Record,
    aligned,
    encode_end,
)
from verl_ckpt_engine.shm.geometry import FRAMES, Geometry
from verl_ckpt_engine.shm.ring import ENDED
from verl_ckpt_engine.tally import SentTally, fingerprint
from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_ckpt_engine.shm.ring import Ring
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Plan, TensorMeta

__all__ = ["OutgoingStream"]

_MOST_FLUSH_BYTES = 1024 * 1024
_LEAST_FLUSH_BYTES = 128 * 1024
_FLUSHES = 8
"""A frame is published once it holds this part of everything, within the limits above: early frames let both sides
work at once, and each costs some time of its own."""


@dataclass(slots=True, kw_only=True)
class _Area:
    """A place for payload."""

    at: int
    size: int
    free_from: int = 0
    """Cursor from which no reader needs it any more."""


class OutgoingStream:
    """Writes one plan's tensors into a ring: `open`, `write` each in the order of the manifest, then `end`."""

    def __init__(
        self,
        ring: Ring,
        generation: int,
        plan: Plan,
        clock: Clock,
        deadline: Deadline,
        *,
        stopped: Callable[[], str | None],
    ) -> None:
        """`stopped` says why the send must end, if it must."""
        self._ring = ring
        self._generation = generation
        self._plan = plan
        self._clock = clock
        self._deadline = deadline
        self._stopped = stopped
        self._tensor: str | None = None
        self.tally = SentTally(plan)
        self._audience = Audience(ring, plan, clock, deadline, check=self._check, error=self.error)
        geometry = Geometry.choose(plan.manifest, bucket_bytes=plan.bucket_bytes)
        self.total_bytes = geometry.total_bytes
        """Size that this plan needs."""
        self._piece_bytes = geometry.piece_bytes
        part = plan.manifest.num_bytes // _FLUSHES
        self._flush_bytes = max(_LEAST_FLUSH_BYTES, min(part, _MOST_FLUSH_BYTES))
        self._small = [_Area(at=at, size=geometry.small_bytes) for at in geometry.small_at]
        self._large = [
            _Area(at=at, size=size) for at, size in zip(geometry.large_at, geometry.large_bytes, strict=True) if size
        ]
        # The frame that is being filled: its area, the bytes used there, the records.
        self._area: _Area | None = None
        self._used = 0
        self._records = 0

    def open(self) -> None:
        """Lay the ring out and look for the readers."""
        self._check(())
        self._audience.find()
        self._ring.announce(
            readers=len(self._plan.receivers),
            total_bytes=self.total_bytes,
            fingerprint=fingerprint(self._plan.manifest),
        )

    def write(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Append one tensor to the stream."""
        self._tensor = meta.name
        self._check(())  # here too: with quick readers no wait below would ever look
        self.tally.check(meta, tensor)
        tensor = tensor.detach()
        num_bytes = tensor.numel() * tensor.element_size()
        hasher = self.tally.hasher(meta)
        if num_bytes <= self._small[0].size:
            at = self._room(num_bytes)
            self._copy(at, tensor, hasher)
            self._put(offset=0, num_bytes=num_bytes, at=at, digest=hasher.intdigest())
        else:
            self._write_pieces(tensor.reshape(-1), num_bytes, hasher)
        self.tally.add(meta, hasher)

    def end(self) -> None:
        """Publish the end and wait until everybody who is left has loaded everything."""
        self.tally.check_end()
        self._check(())
        self._flush()
        self._tensor = None
        self._audience.wait_for_cursor(self._ring.head - FRAMES + 1)
        tally = self.tally
        end = EndRecord(tensors=tally.tensors, num_bytes=tally.num_bytes, digest=tally.digest())
        self._ring.put_table(encode_end(end))
        self._ring.publish(self._generation, END_FRAME, 1)
        self._audience.wait_for_all()
        self._ring.state = ENDED

    def error(self, reason: str, missing: Sequence[str] = ()) -> WeightSyncError:
        """Return the error that says where the stream stands."""
        return WeightSyncError("transfer", reason, self._tensor, missing)

    def _room(self, num_bytes: int) -> int:
        """Return where in the ring the next `num_bytes` go, in the open frame or a new one."""
        area, start = self._area, aligned(self._used)
        if area is not None and (
            start + num_bytes > area.size or self._used >= self._flush_bytes or self._records == MOST_RECORDS
        ):
            self._flush()
            area = None
        if area is None:
            area, start = self._small.pop(0), 0
            self._small.append(area)
            self._audience.wait_for_cursor(max(area.free_from, self._ring.head - FRAMES + 1))
            self._area = area
        self._used = start + num_bytes
        return area.at + start

    def _write_pieces(self, flat: torch.Tensor, num_bytes: int, hasher: PayloadHasher) -> None:
        """Write a tensor to a large area, a frame for each piece: the readers follow at their heels."""
        self._flush()
        fitting = [area for area in self._large if area.size >= num_bytes]
        area = min(fitting, key=lambda area: area.free_from)
        self._audience.wait_for_cursor(area.free_from)
        step = min(self._piece_bytes, _MOST_FLUSH_BYTES)
        item = flat.element_size()
        for offset in range(0, num_bytes, step):
            stop = min(offset + step, num_bytes)
            self._audience.wait_for_cursor(self._ring.head - FRAMES + 1)
            self._copy(area.at + offset, flat[offset // item : stop // item], hasher)
            digest = hasher.intdigest() if stop == num_bytes else 0
            self._put(offset=offset, num_bytes=stop - offset, at=area.at + offset, digest=digest)
            self._publish()
        area.free_from = self._ring.head

    def _put(self, *, offset: int, num_bytes: int, at: int, digest: int) -> None:
        """Add a record of the tensor that is being written to the open frame."""
        record = Record(tensor=self.tally.tensors, offset=offset, num_bytes=num_bytes, at=at, digest=digest)
        self._ring.put_record(self._records, record)
        self._records += 1

    def _flush(self) -> None:
        """Publish the open frame, if there is one."""
        if self._area is not None:
            self._publish()
            self._area.free_from = self._ring.head
            self._area = None
            self._used = 0

    def _publish(self) -> None:
        self._ring.publish(self._generation, DATA_FRAME, self._records)
        self._records = 0

    def _check(self, holders: Sequence[str]) -> None:
        """Raise when the send must end, or took too long because of these."""
        reason = self._stopped()
        if reason is not None:
            raise self.error(reason, holders)
        if not self._deadline.remaining(self._clock):
            raise self.error(f"not taken within {self._deadline.limit_s:.3g} s", holders)

    def _copy(self, at: int, tensor: torch.Tensor, hasher: PayloadHasher) -> None:
        """Copy `tensor` to byte `at` of the ring and hash what arrived there."""
        memory, stop = self._ring.memory, at + tensor.numel() * tensor.element_size()
        memory.populate(at, stop)
        copy_and_hash(tensor, memory.tensor[at:stop], memory.bytes[at:stop], hasher)
