"""A folder's tensors, one after another, each checked before the engine gets it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from verl_ckpt_engine.disk.shards import ShardReader, shard_name
from verl_ckpt_engine.tally import dtype_of, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from verl_ckpt_engine.disk.shards import Entry
    from verl_ckpt_engine.tally import ReceivedTally
    from verl_contracts.weights import TensorMeta

__all__ = ["Memory", "read_tensors"]


class Memory:
    """The place that one tensor after another is read into; as large as the largest so far."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> torch.Tensor:
        """Return the first `num_bytes`."""
        if self._bytes.numel() < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes]


def read_tensors(
    folder: Path,
    tally: ReceivedTally,
    memory: Memory,
    *,
    await_shard: Callable[[Path], None],
    check: Callable[[], None],
) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Yield each tensor, valid until the next.

    `await_shard` returns once a file is there; `check` ends the reading by raising. Raises `WeightSyncError` for
    anything but the tensors of the tally's manifest, unchanged and complete.
    """
    number, end = 0, None
    while end is None:
        path = folder / shard_name(number)
        await_shard(path)
        try:
            opened = ShardReader(path)
        except FileNotFoundError as exc:
            raise tally.error(f"shard {path.name} is missing in {folder}") from exc
        except (OSError, ValueError) as exc:
            raise tally.error(f"{exc}, in {folder}") from exc
        with closing(opened) as shard:
            if shard.session != tally.plan.session:
                raise tally.error(f"shard {path} is of session {shard.session!r}, not {tally.plan.session!r}")
            for entry in shard.entries:
                meta, tensor = _take(shard, entry, tally, memory)
                check()
                yield meta, tensor
                check()
                tally.add(meta, entry.digest)
            number, end = number + 1, shard.end
    tally.check_end(end.tensors, end.num_bytes, end.digest)


def _take(shard: ShardReader, entry: Entry, tally: ReceivedTally, memory: Memory) -> tuple[TensorMeta, torch.Tensor]:
    """Read one tensor, and check and hash it on the way."""
    meta = tally.piece(tally.tensors, 0, entry.num_bytes)
    if entry.meta != meta:
        raise tally.error(f"a file has {entry.meta} where the manifest says {meta}")
    place = memory.room(size_of(meta))
    complete = not entry.num_bytes and tally.hash(meta, memoryview(b""), entry.digest)
    try:
        for piece in shard.read(entry, place):
            complete = tally.hash(meta, piece, entry.digest)
    except (OSError, ValueError) as exc:
        raise tally.error(f"shard {shard.path} was cut while it was read: {exc}") from exc
    if not complete:
        raise tally.error(f"shard {shard.path} has {entry.num_bytes} of its {size_of(meta)} bytes")
    return meta, place.view(dtype_of(meta)).view(meta.shape)
