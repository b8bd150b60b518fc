"""The files: safetensors, written tensor by tensor and read the same way.

Owns what lies where. The places of all tensors follow from the manifest, so that each is written from where the trainer
has it, without a copy of a shard in memory; the header, whose length is known before, comes last. A shard tells its
digests and its session in its metadata, so that it can be loaded as soon as it is there, and to any other reader it is
an ordinary file. Reading maps nothing: a mapped file that is cut would kill the engine instead of raising.
"""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from verl_ckpt_engine.copying import bytes_of
from verl_ckpt_engine.tally import dtype_of, size_of
from verl_contracts.errors import ConfigError
from verl_contracts.weights import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_contracts.weights import Manifest

__all__ = ["STEP_BYTES", "End", "Entry", "Shard", "ShardReader", "ShardWriter", "build_shards", "shard_name"]

STEP_BYTES: Final = 1024 * 1024
"""Bytes that are hashed and written, or read and hashed, while the cache holds them."""

_CODES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES: Final = {code: name for name, code in _CODES.items()}
_MOST_HEADER_BYTES: Final = 100_000_000
"""What other readers of the format accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What the sender says in its last shard."""

    tensors: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which tensors a file holds, in the order of the manifest, and where."""

    name: str
    tensors: tuple[TensorMeta, ...]
    starts: tuple[int, ...]
    """First byte of each, counted from the end of the header; the widest elements come first, so all are aligned."""
    num_bytes: int

    def header(self, *, session: str, version: int, digests: Sequence[int], end: End | None) -> bytes:
        """Return the beginning of the file. Its length does not depend on the digests."""
        metadata = {"format": "pt", "session": session, "version": str(version)}
        metadata["digests"] = " ".join(f"{digest:016x}" for digest in digests)
        if end is not None:
            metadata["end"] = f"{end.tensors} {end.num_bytes} {end.digest}"
        entries: dict[str, object] = {"__metadata__": metadata}
        for meta, start in zip(self.tensors, self.starts, strict=True):
            place = [start, start + size_of(meta)]
            entries[meta.name] = {"dtype": _CODES[meta.dtype], "shape": list(meta.shape), "data_offsets": place}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def shard_name(number: int) -> str:
    """Return the file name of the `number`-th shard."""
    return f"{number:05d}.safetensors"


def build_shards(manifest: Manifest, bucket_bytes: int) -> list[Shard]:
    """Return the shards of a version, at least one: each of at most `bucket_bytes`, or of one larger tensor.

    Raises `ConfigError` for a tensor of a type that the format lacks.
    """
    groups: list[list[TensorMeta]] = [[]]
    used = 0
    for meta in manifest.tensors:
        if meta.dtype not in _CODES:
            raise ConfigError(f"tensor {meta.name!r} has dtype {meta.dtype!r}, which safetensors files cannot hold")
        size = size_of(meta)
        if groups[-1] and used + size > bucket_bytes:
            groups.append([])
            used = 0
        groups[-1].append(meta)
        used += size
    return [_shard(shard_name(number), tuple(group)) for number, group in enumerate(groups)]


def _shard(name: str, tensors: tuple[TensorMeta, ...]) -> Shard:
    starts = [0] * len(tensors)
    at = 0
    for index in sorted(range(len(tensors)), key=lambda index: -dtype_of(tensors[index]).itemsize):
        starts[index] = at
        at += size_of(tensors[index])
    return Shard(name=name, tensors=tensors, starts=tuple(starts), num_bytes=at)


class ShardWriter:
    """One shard that is being written, under another name until it is whole."""

    def __init__(self, folder: Path, shard: Shard, *, session: str, version: int, end: End | None) -> None:
        """`end` is None but for the last shard; its digest may still be unknown."""
        self.shard = shard
        self._session = session
        self._version = version
        self._digests: list[int] = []
        self._path = folder / f".{shard.name}"
        header = shard.header(session=session, version=version, digests=[0] * len(shard.tensors), end=end)
        self._payload_at = len(header)
        self.written = 0
        """Bytes of payload in the file."""
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def full(self) -> bool:
        """Whether every tensor is in."""
        return len(self._digests) == len(self.shard.tensors)

    def write(self, tensor: torch.Tensor, hasher: PayloadHasher) -> None:
        """Hash and write the next tensor, of any strides."""
        at = self._payload_at + self.shard.starts[len(self._digests)]
        if tensor.numel():
            dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
            data = bytes_of(dense.reshape(-1).view(torch.uint8))
            for first in range(0, len(data), STEP_BYTES):
                step = data[first : first + STEP_BYTES]
                hasher.update(step)
                _write(self._descriptor, step, at + first)
                self.written += len(step)
        self._digests.append(hasher.intdigest())

    def finish(self, end: End | None) -> None:
        """Write the header, and let others see the file: closed first, which is when network file systems send it."""
        header = self.shard.header(session=self._session, version=self._version, digests=self._digests, end=end)
        if len(header) != self._payload_at:
            raise ValueError(f"the header of {self._path} has {len(header)} bytes, {self._payload_at} were left for it")
        _write(self._descriptor, memoryview(header), 0)
        self._close()
        self._path.rename(self._path.with_name(self.shard.name))

    def discard(self) -> None:
        """Close the file, and remove it unless others see it."""
        self._close()
        self._path.unlink(missing_ok=True)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a shard."""

    meta: TensorMeta
    start: int
    """First byte, counted from the beginning of the file."""
    num_bytes: int
    digest: int


class ShardReader:
    """A shard that is whole, or raises ValueError saying why not. Closed by `close`."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError when it is not there."""
        self.path = path
        self.end: End | None = None
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self._parse(os.fstat(self._descriptor).st_size)
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            self.close()
            raise ValueError(f"shard {path.name} is damaged: {exc}") from exc

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, entry: Entry, into: torch.Tensor) -> Iterator[memoryview]:
        """Read a tensor, and yield each piece of it once it is there."""
        data = bytes_of(into)
        for first in range(0, entry.num_bytes, STEP_BYTES):
            piece = data[first : min(first + STEP_BYTES, entry.num_bytes)]
            self._read(piece, entry.start + first)
            yield piece

    def _read(self, into: memoryview, at: int) -> None:
        done = 0
        while done < len(into):
            got = os.preadv(self._descriptor, [into[done:]], at + done)
            if not got:
                raise ValueError(f"it ends at byte {at + done}")
            done += got

    def _parse(self, size: int) -> None:
        length = bytearray(8)
        self._read(memoryview(length), 0)
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"its header of {header_bytes} bytes does not fit into its {size} bytes")
        text = bytearray(header_bytes)
        self._read(memoryview(text), 8)
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        self.session = str(metadata["session"])
        digests = [int(word, 16) for word in str(metadata["digests"]).split()]
        if "end" in metadata:
            tensors, num_bytes, digest = str(metadata["end"]).split()
            self.end = End(tensors=int(tensors), num_bytes=int(num_bytes), digest=digest)
        payload_at = 8 + header_bytes
        self.entries = [
            _entry(name, entry, payload_at, digest)
            for (name, entry), digest in zip(entries.items(), digests, strict=True)
        ]
        needed = max((entry.start + entry.num_bytes for entry in self.entries), default=payload_at)
        if size != needed:
            raise ValueError(f"it has {size} bytes where its header promises {needed}")


def _entry(name: str, said: dict[str, object], payload_at: int, digest: int) -> Entry:
    shape, places = said["shape"], said["data_offsets"]
    if not isinstance(shape, list) or not isinstance(places, list):
        raise ValueError(f"its header says {said} of tensor {name!r}")
    meta = TensorMeta(name=name, shape=tuple(int(size) for size in shape), dtype=_NAMES[str(said["dtype"])])
    start, stop = (int(place) for place in places)
    if start < 0 or stop - start != size_of(meta):
        raise ValueError(f"its header gives tensor {name!r} of {size_of(meta)} bytes the place {places}")
    return Entry(meta=meta, start=payload_at + start, num_bytes=stop - start, digest=digest)
