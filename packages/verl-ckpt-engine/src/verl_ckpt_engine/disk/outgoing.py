"""One send under way: the shard that is being written, the counts, the end.

Owns the order in which things become visible: each shard when it is whole, the marker when all shards have reached the
disk. Receivers of the session need no marker, so nobody waits for the disk while replicas are paused. A disk that is
full is an error that says where, and how much was written.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from verl_ckpt_engine.disk.audience import Audience
from verl_ckpt_engine.disk.folders import FOLDER_VARIABLE
from verl_ckpt_engine.disk.marker import Marker
from verl_ckpt_engine.disk.shards import End, ShardWriter, build_shards
from verl_ckpt_engine.tally import SentTally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.errors import WeightSyncError
    from verl_contracts.weights import Plan, TensorMeta

__all__ = ["OutgoingFolder"]


class OutgoingFolder:
    """Writes one plan's tensors into a folder: `write` each in the order of the manifest, then `end`, then `seal`."""

    def __init__(
        self, folder: Path, plan: Plan, clock: Clock, deadline: Deadline, *, stopped: Callable[[], str | None]
    ) -> None:
        """`stopped` says why the send must end, if it must."""
        self._folder = folder
        self._plan = plan
        self._clock = clock
        self._deadline = deadline
        self._stopped = stopped
        self._shards = build_shards(plan.manifest, plan.bucket_bytes)
        self._finished = 0
        self._writer: ShardWriter | None = None
        self._written = 0
        self.tally = SentTally(plan)
        self._audience = Audience(folder, plan, clock, error=self.tally.error)

    def write(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Append one tensor."""
        self._check(self._audience.missing)
        self._audience.glance()
        self.tally.check(meta, tensor)
        hasher = self.tally.hasher(meta)
        try:
            writer = self._open()
            writer.write(tensor, hasher)
            self.tally.add(meta, hasher)
            if writer.full and self._finished < len(self._shards) - 1:
                self._finish(writer, None)
        except OSError as exc:
            raise self._error(exc) from exc

    def end(self) -> None:
        """Let the last shard be seen, and wait until everybody who is left has loaded everything."""
        tally = self.tally
        tally.check_end()
        try:
            end = End(tensors=tally.tensors, num_bytes=tally.num_bytes, digest=tally.digest())
            self._finish(self._open(), end)
        except OSError as exc:
            raise self._error(exc) from exc
        self._audience.wait_for_all(self._deadline, self._check)

    def seal(self) -> None:
        """Make the version complete, for those who come late. Raises OSError when the disk refuses."""
        for shard in self._shards:
            _flush(self._folder / shard.name)
        Marker.of(self._plan, self._shards, self.tally.digests, self.tally.digest()).write(self._folder)

    def discard(self) -> None:
        """Remove the shard that is not whole. Never raises."""
        if self._writer is not None:
            self._writer.discard()

    def _open(self) -> ShardWriter:
        """Return the shard that is being written, a new one if need be."""
        if self._writer is None:
            manifest, shard = self._plan.manifest, self._shards[self._finished]
            unknown = End(tensors=len(manifest.tensors), num_bytes=manifest.num_bytes, digest="0" * 32)
            self._writer = ShardWriter(
                self._folder,
                shard,
                session=self._plan.session,
                version=self._plan.version,
                end=unknown if shard is self._shards[-1] else None,
            )
        return self._writer

    def _finish(self, writer: ShardWriter, end: End | None) -> None:
        writer.finish(end)
        self._written += writer.written
        self._finished += 1
        self._writer = None

    def _check(self, holders: Sequence[str]) -> None:
        """Raise when the send must end, or took too long because of these."""
        reason = self._stopped()
        if reason is not None:
            raise self.tally.error(reason, holders)
        if not self._deadline.remaining(self._clock):
            raise self.tally.error(f"not loaded within {self._deadline.limit_s:.3g} s", holders)

    def _error(self, exc: OSError) -> WeightSyncError:
        """Return the error that says where the disk refused, and how much it had taken."""
        reason = self._stopped()
        if reason is not None:
            return self.tally.error(reason)
        written = self._written + (self._writer.written if self._writer is not None else 0)
        total, root = self._plan.manifest.num_bytes, self._folder.parent
        try:
            free = f"{shutil.disk_usage(root).free} bytes are free there"
        except OSError:
            free = "that folder is gone"
        return self.tally.error(
            f"writing to {self._folder} failed: {exc.strerror or exc}; {written} of {total} bytes were written, "
            f"{free}; make room, or set {FOLDER_VARIABLE} in the trainer's environment to another folder that all "
            "replicas see"
        )


def _flush(path: Path) -> None:
    """Return once a file has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
