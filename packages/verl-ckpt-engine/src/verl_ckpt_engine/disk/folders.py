"""The versions under a root: where the root is, how a version's folder begins, and when it goes.

Owns that nothing stays behind and nothing goes that somebody needs. A folder is begun and removed under another name,
so that nobody sees half of one. The sender's seat in it is held as long as its process lives: a version that is not
complete and whose seat is free belongs to nobody. Who loads a version late holds its marker, and clean-up leaves it.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from verl_ckpt_engine.disk.seats import FAIL, HERE, SENDER, Seat, is_held, locked
from verl_contracts.errors import ConfigError, StateError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "FOLDER_VARIABLE",
    "MARKER",
    "VersionFolder",
    "begin_version",
    "complete_versions",
    "find_root",
    "prune",
    "remove",
    "sweep",
]

FOLDER_VARIABLE: Final = "VERL_WEIGHTS_FOLDER"
"""Environment variable of the sender that names the folder for weights; receivers are told."""
MARKER: Final = "manifest.json"
"""The file that makes a version complete."""

_BEGUN: Final = ".new-"
_REMOVED: Final = ".removed-"
_OLD_S: Final = 3600.0
"""Age after which a folder that was begun and has no seat is taken for left behind."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFolder:
    """The folder of one version, as its sender holds it."""

    path: Path
    seat: Seat


def find_root() -> Path:
    """Return the folder for weights, which is made if need be.

    It is what `FOLDER_VARIABLE` names, else one of this user's own for temporary files. Raises `ConfigError` when that
    one is somebody else's, open to others, or a link: weights are code to those who load them.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    root = Path(chosen).absolute() if chosen else Path(tempfile.gettempdir()) / f"verl-disk-weights-{os.getuid()}"
    fix = f"set {FOLDER_VARIABLE} in the trainer's environment to another folder that all replicas see"
    try:
        root.mkdir(mode=0o700, parents=bool(chosen), exist_ok=True)
        found = root.lstat()
    except OSError as exc:
        raise ConfigError(f"the folder for weights {root} cannot be made: {exc.strerror}; {fix}") from exc
    if chosen:
        return root
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"the folder for weights {root} is a link; remove it, or {fix}")
    if found.st_uid != os.getuid():
        raise ConfigError(f"the folder for weights {root} belongs to user {found.st_uid}, not {os.getuid()}; {fix}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"the folder for weights {root} is open to others (mode {mode:o}): chmod 700 it, or {fix}")
    return root


def begin_version(root: Path, version: int, session: str, num_bytes: int) -> VersionFolder:
    """Make the folder of a session. Raises `WeightSyncError` when there is no room for what it will hold."""
    free = shutil.disk_usage(root).free
    if num_bytes > free:
        raise WeightSyncError(
            "prepare",
            f"version {version} has {num_bytes} bytes, and only {free} are free at {root}; make room there, or set "
            f"{FOLDER_VARIABLE} in the trainer's environment to another folder that all replicas see",
        )
    begun = root / f"{_BEGUN}{uuid.uuid4().hex}"
    path = root / f"v{version:08d}-{quote(session, safe='')}"
    begun.mkdir()
    try:
        seat = Seat.take(begun, SENDER)
        begun.rename(path)
    except OSError as exc:
        shutil.rmtree(begun, ignore_errors=True)
        if path.exists():
            raise StateError(f"session {session!r} was used already: {path} exists") from exc
        raise
    except ConfigError:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    seat.move(path)
    return VersionFolder(path=path, seat=seat)


def complete_versions(root: Path) -> list[Path]:
    """Return the folders of complete versions, in the order in which they became complete."""
    found: list[tuple[int, str, Path]] = []
    for path in _versions(root):
        with suppress(OSError):
            found.append(((path / MARKER).stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found)]


def remove(path: Path) -> None:
    """Remove a folder, first its name and then what is in it. Idempotent."""
    gone = path.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
    with suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what senders left behind that were killed: folders that are not complete and whose seat is free."""
    for path in root.iterdir():
        if path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(_BEGUN):
            with suppress(OSError):
                if not _held(path, or_else=time.time() - path.stat().st_mtime < _OLD_S):
                    remove(path)
    for path in _versions(root):
        with suppress(OSError):
            if not (path / MARKER).exists() and not _held(path, or_else=True):
                _log.info("removing %s, which a sender that was killed left behind", path)
                remove(path)


def prune(root: Path, mine: Sequence[VersionFolder], keep: int) -> list[VersionFolder]:
    """Remove complete versions but the newest `keep`: of this sender and of those that are gone, not of others alive.

    One that is being loaded is left to whoever prunes next. Returns which of this sender's are left.
    """
    seats = {folder.path: folder for folder in mine}
    for path in [path for path in complete_versions(root) if path in seats or not _held_or_gone(path)][: -keep or None]:
        held = seats.pop(path, None)
        if held is not None:
            held.seat.leave()
        with suppress(OSError), locked(path / MARKER, shared=False) as free:
            if free:
                remove(path)
    return [folder for folder in mine if folder.path in seats]


def _versions(root: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in root.glob("v????????*-*") if path.is_dir())


def _held(path: Path, *, or_else: bool) -> bool:
    """Return whether the sender of a folder lives; `or_else` where it has no seat."""
    for state in (HERE, FAIL):
        with suppress(FileNotFoundError):
            return is_held(path / f"{state}-{SENDER}")
    return or_else


def _held_or_gone(path: Path) -> bool:
    try:
        return _held(path, or_else=True)
    except OSError:
        return True
