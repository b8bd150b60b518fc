"""The folder of one run: who wrote what where, and the refusal to mix two runs.

A folder is recognized as a run's by a marker file. Only what a run writes is ever removed, and only when asked to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink, JsonValue

__all__ = ["JsonlEvents", "RunFolder"]

_log = logging.getLogger(__name__)

_MARKER = ".verl-run"
_CONTENTS = (
    "config.yaml",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "rollouts.jsonl",
    "rollouts.partial",
    "summary.json",
    "error.txt",
    "run.log",
    "model",
    "prepared",
    "logs",
    "tensorboard",
    "wandb",
    "mlflow",
)
_FLUSH_S = 1.0


_LOCKS: dict[Path, int] = {}
"""Run folder → descriptor of its marker, which this process keeps locked for as long as it lives."""


def _lock(path: Path) -> None:
    """Claim a run folder for this process. Raises `ConfigError` while another one holds it."""
    if path in _LOCKS:
        return
    marker = os.open(path / _MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(marker)
        raise ConfigError(f"--out {path}: a run is going on in it; choose another folder") from None
    _LOCKS[path] = marker


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunFolder:
        """Make an empty run folder.

        Raises `ConfigError` when a previous run is there and `overwrite` is not set, and in any case when the folder
        holds something else.
        """
        try:
            return cls._create(path, overwrite=overwrite)
        except OSError as exc:
            raise ConfigError(f"--out {path}: cannot be made: {exc.strerror or exc}") from exc

    @classmethod
    def _create(cls, path: Path, *, overwrite: bool) -> RunFolder:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--out {path}: is a file; choose another folder")
        if path.is_dir() and any(path.iterdir()):
            if not (path / _MARKER).exists():
                raise ConfigError(f"--out {path}: holds files that no run wrote; choose another folder")
            _lock(path)
            if not overwrite:
                raise ConfigError(f"--out {path}: holds a previous run; add --overwrite, or choose another folder")
            for name in reversed(_CONTENTS):
                _remove(path / name)
        path.mkdir(parents=True, exist_ok=True)
        _lock(path)
        folder = cls(path)
        folder.logs.mkdir()
        return folder

    def discard(self) -> None:
        """Take back everything that `create` and a refused start wrote, so that the name can be used again."""
        for name in (*_CONTENTS, _MARKER):
            _remove(self.path / name)
        with contextlib.suppress(OSError):  # somebody put something else there meanwhile
            self.path.rmdir()

    @property
    def has_steps(self) -> bool:
        """Whether a step was recorded: from then on nothing is taken back, whatever ends the run."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened when."""
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        """Some samples, with the version that made each token."""
        return self.path / "samples.jsonl"

    @property
    def rollouts(self) -> Path:
        """The groups that a run which only generates saves; there only when it finished."""
        return self.path / "rollouts.jsonl"

    @property
    def summary(self) -> Path:
        """The few numbers that say how the run went; there only when it finished."""
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        """The final policy."""
        return self.path / "model"

    @property
    def prepared(self) -> Path:
        """What the recipe's `prepare` made."""
        return self.path / "prepared"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.path / "logs"

    def write_config(self, text: str) -> None:
        """Write ``config.yaml``, the resolved configuration."""
        (self.path / "config.yaml").write_text(text, encoding="utf-8")

    def write_summary(self, summary: Mapping[str, JsonValue]) -> None:
        """Write ``summary.json``: complete or absent."""
        partial = self.summary.with_suffix(".partial")
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.summary)  # noqa: PTH105  the name says that it is atomic

    def write_error(self, text: str) -> None:
        """Write ``error.txt``, the whole traceback of a failed run."""
        (self.path / "error.txt").write_text(text, encoding="utf-8", errors="backslashreplace")


class JsonlEvents:
    """Appends events to a file as JSON lines; what is there is at most a second old. `close` it.

    Each line has the monotonic seconds, ``at``, for measuring, and the seconds since the epoch, ``time``, for finding
    it in a log.
    """

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._clock = clock
        self._flushed = clock.now()

    def emit(self, name: str, fields: Mapping[str, JsonValue], /) -> None:
        """Record that `name` happened now. Never raises: an event that cannot be written is logged."""
        now = self._clock.now()
        try:
            self._file.write(json.dumps({"name": name, "at": now, "time": self._clock.wall(), "fields": fields}) + "\n")
            if now - self._flushed > _FLUSH_S:
                self._flushed = now
                self._file.flush()
        except (OSError, TypeError, ValueError) as exc:
            _log.warning("event %s was not written: %s", name, exc)

    def close(self) -> None:
        """Write everything down. Idempotent."""
        self._file.close()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if TYPE_CHECKING:

    def _is_event_sink(x: JsonlEvents) -> EventSink:
        return x
