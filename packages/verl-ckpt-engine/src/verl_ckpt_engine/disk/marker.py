"""The marker: the last file of a version, which makes it complete and describes it.

Owns what is promised to those who load without a sender. It is written when all that it names has reached the disk.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from verl_ckpt_engine.disk.folders import MARKER
from verl_contracts.weights import Manifest, TensorMeta, WireFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from verl_ckpt_engine.disk.shards import Shard
    from verl_contracts.weights import Plan, Verification

__all__ = ["WIRE_FORMAT", "Marker"]

WIRE_FORMAT: Final = WireFormat(format_id="safetensors-folder", version=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What a complete version says of itself."""

    session: str
    manifest: Manifest
    verification: Verification
    digests: Mapping[str, int]
    digest: str
    """Over all tensors."""
    shards: Mapping[str, str]
    """Name of a tensor → name of its file."""

    @classmethod
    def of(cls, plan: Plan, shards: Sequence[Shard], digests: Mapping[str, int], digest: str) -> Marker:
        """Return the marker of what was sent."""
        return cls(
            session=plan.session,
            manifest=plan.manifest,
            verification=plan.verification,
            digests=digests,
            digest=digest,
            shards={meta.name: shard.name for shard in shards for meta in shard.tensors},
        )

    def write(self, folder: Path) -> None:
        """Make `folder` complete, and see to it that it stays so."""
        text = json.dumps(
            {
                "format": WIRE_FORMAT.format_id,
                "format_version": WIRE_FORMAT.version,
                "version": self.manifest.version,
                "session": self.session,
                "num_tensors": len(self.manifest.tensors),
                "num_bytes": self.manifest.num_bytes,
                "verification": self.verification,
                "digest": self.digest,
                "tensors": [
                    {
                        "name": meta.name,
                        "shape": list(meta.shape),
                        "dtype": meta.dtype,
                        "shard": self.shards[meta.name],
                        "digest": f"{self.digests[meta.name]:016x}",
                    }
                    for meta in self.manifest.tensors
                ],
            },
            indent=1,
        )
        path = folder / f".{MARKER}"
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        path.rename(folder / MARKER)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @classmethod
    def read(cls, folder: Path) -> Marker:
        """Return what `folder` says. Raises OSError without a marker, ValueError for one that cannot be understood."""
        try:
            said = json.loads((folder / MARKER).read_text(encoding="utf-8"))
            spoken = WireFormat(format_id=said["format"], version=said["format_version"])
            if spoken != WIRE_FORMAT:
                raise ValueError(f"it is of format {spoken.format_id} {spoken.version}, which this release cannot read")
            tensors = [
                TensorMeta(name=str(each["name"]), shape=tuple(map(int, each["shape"])), dtype=str(each["dtype"]))
                for each in said["tensors"]
            ]
            if len(tensors) != said["num_tensors"]:
                raise ValueError(f"it lists {len(tensors)} tensors and counts {said['num_tensors']}")
            return cls(
                session=str(said["session"]),
                manifest=Manifest(
                    version=int(said["version"]), tensors=tuple(tensors), num_bytes=int(said["num_bytes"])
                ),
                verification=cast("Verification", said["verification"]),
                digests={str(each["name"]): int(each["digest"], 16) for each in said["tensors"]},
                digest=str(said["digest"]),
                shards={str(each["name"]): str(each["shard"]) for each in said["tensors"]},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            raise ValueError(f"{MARKER} is damaged: {exc}") from exc
