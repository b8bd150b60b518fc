"""Loading a complete version without a sender: for a replica that starts later, or elsewhere.

Owns that what is loaded is one whole version: its marker is held meanwhile, which clean-up respects, and every tensor
is verified as in a sync.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl_ckpt_engine.disk.folders import MARKER, complete_versions
from verl_ckpt_engine.disk.marker import Marker
from verl_ckpt_engine.disk.reading import Memory, read_tensors
from verl_ckpt_engine.disk.seats import locked
from verl_ckpt_engine.tally import ReceivedTally
from verl_contracts.errors import WeightSyncError
from verl_contracts.weights import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_contracts.weights import LoadReport, Manifest, WeightTarget

__all__ = ["latest_complete", "load_folder", "manifest_of"]


def latest_complete(root: Path) -> Path | None:
    """Return the folder under `root` that became complete last; None when there is none.

    It may be cleaned up before it is loaded, when a newer one has become complete: ask again then.
    """
    found = complete_versions(root)
    return found[-1] if found else None


def manifest_of(folder: Path) -> Manifest:
    """Return what a complete version holds, its number included. Raises `WeightSyncError` when it is not complete."""
    return _marker_of(folder).manifest


def load_folder(folder: Path, target: WeightTarget) -> LoadReport:
    """Load a complete version into `target`, verified.

    Raises `WeightSyncError`: in phase ``"connect"`` for a folder that is not complete, damaged in its marker or gone,
    when nothing was loaded; in phase ``"transfer"`` for what goes wrong later, when the weights are mixed.
    """
    with _held(folder):
        marker = _marker_of(folder)
        tally = ReceivedTally(
            Plan(
                session=marker.session,
                version=marker.manifest.version,
                manifest=marker.manifest,
                senders=(),
                receivers=(),
                bucket_bytes=1,
                verification=marker.verification,
            )
        )
        try:
            items = read_tensors(folder, tally, Memory(), await_shard=lambda _: None, check=lambda: None)
            load = target.load(items)
            tally.check_load(load)
        except Exception as exc:
            error = exc if isinstance(exc, WeightSyncError) else tally.error(f"{type(exc).__name__}: {exc}")
            raise WeightSyncError(error.phase, f"loading {folder}: {error.reason}", error.tensor) from exc
        if tally.digest() != marker.digest:
            raise tally.error(f"loading {folder}: the digest over all tensors is not the one in {MARKER}")
    return load


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keep clean-up away from a folder for the block; if it came first, there is nothing to read by now."""
    try:
        with locked(folder / MARKER, shared=True) as free:
            if not free:
                raise _refused(folder, "it is being cleaned up, for a newer one is complete")
            yield
    except FileNotFoundError as exc:
        reason = f"it has no {MARKER}, so it is not complete" if folder.is_dir() else "there is no such folder"
        raise _refused(folder, reason) from exc


def _marker_of(folder: Path) -> Marker:
    try:
        return Marker.read(folder)
    except FileNotFoundError as exc:
        reason = f"it has no {MARKER}, so it is not complete" if folder.is_dir() else "there is no such folder"
        raise _refused(folder, reason) from exc
    except (OSError, ValueError) as exc:
        raise _refused(folder, str(exc)) from exc


def _refused(folder: Path, reason: str) -> WeightSyncError:
    return WeightSyncError("connect", f"{folder} cannot be loaded: {reason}")
