"""What was sent, and what arrived, tensor by tensor, against what the manifest promises.

Owns the checks that every backend owes: order, counts, shapes, types, digests, the end. How bytes travel is the
backend's business. A stream that stops is an error with counts, never a shorter model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import xxhash

from verl_ckpt_engine.digest import combined_digest, payload_hasher
from verl_contracts.errors import ConfigError, WeightSyncError
from verl_contracts.weights import TransferReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_ckpt_engine.digest import PayloadHasher
    from verl_contracts.weights import LoadReport, Manifest, Plan, TensorMeta

__all__ = ["ReceivedTally", "SentTally", "dtype_of", "fingerprint", "size_of"]


class _Tally:
    """Counts of one transfer, and its errors."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tensors = 0
        self.num_bytes = 0
        self.digests: dict[str, int] = {}

    @property
    def complete(self) -> bool:
        """Whether everything that the manifest promises is there."""
        manifest = self.plan.manifest
        return (self.tensors, self.num_bytes) == (len(manifest.tensors), manifest.num_bytes)

    def counts(self) -> str:
        """Return in words how much is there."""
        manifest = self.plan.manifest
        return f"{self.tensors} of {len(manifest.tensors)} tensors, {self.num_bytes} of {manifest.num_bytes} bytes"

    def error(self, reason: str, missing: Sequence[str] = ()) -> WeightSyncError:
        """Return the error that says where the stream stands."""
        expected = self.plan.manifest.tensors
        tensor = expected[self.tensors].name if self.tensors < len(expected) else None
        return WeightSyncError("transfer", reason, tensor, missing)

    def digest(self) -> str:
        """Return the digest over all tensors, once it is complete."""
        return combined_digest(self.plan.manifest, self.digests)

    def _add(self, meta: TensorMeta, digest: int) -> None:
        self.tensors += 1
        self.num_bytes += size_of(meta)
        self.digests[meta.name] = digest

    def report(self, owner: str, rank: int, seconds: float, skipped: tuple[str, ...] = ()) -> TransferReport:
        """Return what one rank says of its transfer."""
        return TransferReport(
            owner=owner,
            rank=rank,
            tensors=self.tensors,
            num_bytes=self.num_bytes,
            seconds=seconds,
            digests=self.digests,
            skipped=skipped,
        )


class SentTally(_Tally):
    """What a sender gave out."""

    def check(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Raise unless this is the tensor that the manifest promises next."""
        expected = self.plan.manifest.tensors
        if self.tensors >= len(expected):
            raise self.error(f"the source gives more than the {len(expected)} tensors of its manifest")
        wanted = expected[self.tensors]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if meta != wanted or tensor.shape != wanted.shape or dtype != wanted.dtype:
            raise self.error(
                f"the source gives {meta.name} {tuple(tensor.shape)} {dtype} where its manifest says "
                f"{wanted.name} {wanted.shape} {wanted.dtype}"
            )

    def hasher(self, meta: TensorMeta) -> PayloadHasher:
        """Return a hasher for one tensor."""
        return payload_hasher(size_of(meta), self.plan.verification)

    def add(self, meta: TensorMeta, hasher: PayloadHasher) -> None:
        """Count a tensor whose last byte went out."""
        self._add(meta, hasher.intdigest())

    def check_end(self) -> None:
        """Raise unless everything went out."""
        if not self.complete:
            raise self.error(f"the source ended after {self.counts()}")


class ReceivedTally(_Tally):
    """What a receiver took in."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._hasher: PayloadHasher | None = None
        self._done = 0
        self._ended = False

    def piece(self, tensor: int, offset: int, num_bytes: int) -> TensorMeta:
        """Return whose bytes these are. Raises unless they are the ones that come next."""
        expected = self.plan.manifest.tensors
        if tensor != self.tensors or tensor >= len(expected):
            raise self.error(f"tensor {tensor} arrives where {self.counts()} are there")
        meta = expected[tensor]
        total = size_of(meta)
        if offset != self._done or offset + num_bytes > total:
            raise self.error(f"bytes from {offset} arrive where {self._done} of {total} are there")
        return meta

    def hash(self, meta: TensorMeta, data: memoryview, digest: int) -> bool:
        """Hash a piece; return whether it completes its tensor, which must have been sent with `digest`."""
        if self._hasher is None:
            self._hasher = payload_hasher(size_of(meta), self.plan.verification)
        self._hasher.update(data)
        self._done += len(data)
        if self._done < size_of(meta):
            return False
        found = self._hasher.intdigest()
        if found != digest:
            raise self.error(f"the payload was changed on the way: digest {found:#x}, sent {digest:#x}")
        return True

    def add(self, meta: TensorMeta, digest: int) -> None:
        """Count a tensor that the engine has taken."""
        self._hasher, self._done = None, 0
        self._add(meta, digest)

    def check_end(self, tensors: int, num_bytes: int, digest: str) -> None:
        """Raise unless everything is here, and is what the sender claims at the end."""
        if self._hasher is not None or not self.complete:
            raise self.error(f"the stream was cut: it ended after {self.counts()}")
        if (tensors, num_bytes) != (self.tensors, self.num_bytes):
            raise self.error(f"the sender counts {tensors} tensors, {num_bytes} bytes; here {self.counts()}")
        if digest != self.digest():
            raise self.error("the digest over all tensors differs from the sender's")
        self._ended = True

    def check_load(self, load: LoadReport) -> None:
        """Raise unless the engine took the whole stream and accounts for every name."""
        if not self._ended:
            raise self.error(f"the engine stopped taking tensors after {self.counts()}")
        expected = [meta.name for meta in self.plan.manifest.tensors]
        missing = sorted(set(expected) - set(load.loaded) - set(load.skipped))
        if missing:
            listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                "transfer", f"the engine neither loaded nor skipped {listed} of {len(expected)} tensors"
            )


def size_of(meta: TensorMeta) -> int:
    """Return how many bytes a tensor has on the wire."""
    return math.prod(meta.shape) * dtype_of(meta).itemsize


def dtype_of(meta: TensorMeta) -> torch.dtype:
    """Return the dtype of a tensor. Raises `ConfigError` when this torch lacks it."""
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"tensor {meta.name!r} has dtype {meta.dtype!r}, which torch {torch.__version__} lacks")
    return dtype


def fingerprint(manifest: Manifest) -> int:
    """Return a hash of version, names, shapes and dtypes, in [0, 2**63)."""
    hasher = xxhash.xxh3_64(str(manifest.version).encode())
    for meta in manifest.tensors:
        hasher.update(f"{meta.name}\0{meta.dtype}\0{meta.shape}\n".encode())
    return hasher.intdigest() >> 1
