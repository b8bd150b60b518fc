"""What ranks report of a transfer, against what its manifest promises and against each other. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.weights import Manifest, TransferReport

__all__ = ["check_received", "check_sent"]


def check_sent(manifest: Manifest, reports: Sequence[TransferReport]) -> Mapping[str, int]:
    """Return the digests of what was sent. Raises `WeightSyncError` unless that is the manifest, from each rank alike.

    A rank that only gathered with the others reports nothing; of the rest each sent everything, to its own receivers.
    """
    sent = [report for report in reports if report.digests or not manifest.tensors]
    if not sent:
        raise WeightSyncError("verify", "no sender rank reports that it sent anything")
    first = sent[0]
    for report in sent:
        unsent = [meta.name for meta in manifest.tensors if meta.name not in report.digests]
        if unsent or not _complete(manifest, report):
            counts = _counts(manifest, report)
            raise WeightSyncError(
                "verify", f"sender rank {report.rank} reports {counts}{_listed('; not sent', unsent)}"
            )
        differing = [name for name, digest in first.digests.items() if report.digests[name] != digest]
        if differing:
            ranks = f"sender ranks {first.rank} and {report.rank}"
            raise WeightSyncError(
                "verify", f"{ranks} sent different weights{_listed('; differing', differing)}", differing[0]
            )
    return first.digests


def check_received(
    manifest: Manifest, digests: Mapping[str, int], reports: Sequence[TransferReport], *, ranks: int
) -> None:
    """Raise `WeightSyncError` unless all `ranks` of a replica report that they hold what has these digests."""
    if len(reports) != ranks:
        raise WeightSyncError("verify", f"{len(reports)} of {ranks} ranks reported")
    for report in reports:
        wrong = [name for name, digest in digests.items() if report.digests.get(name) != digest]
        if wrong or not _complete(manifest, report):
            counts = _counts(manifest, report)
            reason = f"rank {report.rank} has {counts}{_listed('; not as sent', wrong)}"
            raise WeightSyncError("verify", reason, wrong[0] if wrong else None)


def _complete(manifest: Manifest, report: TransferReport) -> bool:
    return (report.tensors, report.num_bytes) == (len(manifest.tensors), manifest.num_bytes)


def _counts(manifest: Manifest, report: TransferReport) -> str:
    return f"{report.tensors} of {len(manifest.tensors)} tensors, {report.num_bytes} of {manifest.num_bytes} bytes"


def _listed(label: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{label}: {', '.join(names[:5])}{more}" if names else ""
