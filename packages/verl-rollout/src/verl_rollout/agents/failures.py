"""What is told of samples that failed: where in the loop it happened, once, and how often.

Owns the description of what a loop raised, and the lines in the log. It prevents a mistake in a user's loop from being
a bare "ValueError: x" a thousand times over: each distinct cause is logged with its traceback once.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import verl_contracts
import verl_rollout
from verl_contracts.errors import WaitTimeout
from verl_contracts.failures import FailureRecord, first_cause

if TYPE_CHECKING:
    from traceback import FrameSummary

__all__ = ["FailureLog", "describe"]

_log = logging.getLogger(__name__)

_WORKER = str(Path(__file__).with_name("worker.py"))
_NOT_OF_USERS = (
    *(f"{Path(file).parent}{os.sep}" for file in (verl_rollout.__file__, verl_contracts.__file__)),
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
"""How the file names begin of our code, of Python's and of installed packages'."""
_MOST_CAUSES = 10
"""Distinct causes that are logged in full; a loop whose every failure is another one must not flood the log."""
_OTHERS = "other causes"


def describe(exc: Exception, *, role: str, rank: int) -> FailureRecord:
    """Describe what a loop raised: its own frames, and the cause with ``file:line`` in its code."""
    record = FailureRecord.from_exception(_without_our_frames(exc), role=role, rank=rank)
    place = _place(first_cause(exc))
    return replace(record, cause=f"{record.cause} ({place})") if place else record


class FailureLog:
    """Logs a failure in full when its cause is new, and counts it otherwise."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, sample: str, outcome: str, record: FailureRecord, *, level: int = logging.WARNING) -> None:
        """Log that `sample` ended like this. Two timeouts are one cause, whatever they waited for."""
        cause = outcome if record.cause.startswith(WaitTimeout.__name__) else record.cause
        if cause not in self._counts and len(self._counts) >= _MOST_CAUSES:
            cause = _OTHERS
        self._counts[cause] += 1
        if self._counts[cause] > 1 or cause == _OTHERS:
            _log.debug("%s: %s, %d by now: %s", sample, outcome, self._counts[cause], record.cause)
            return
        lines = record.lines if len(record.lines) > 1 else ()  # a single one is the cause again
        _log.log(level, "%s: %s: %s", sample, outcome, "\n".join([record.cause, *(f"  | {line}" for line in lines)]))

    def close(self) -> None:
        """Say how often causes came up that were logged once."""
        for cause, count in self._counts.items():
            if cause == _OTHERS:
                _log.info("%d more samples ended for other causes", count)
            elif count > 1:
                _log.info("%d samples ended alike: %s", count, cause)
        self._counts.clear()


def _without_our_frames(exc: Exception) -> Exception:
    """Cut the traceback of `exc` to what lies below the worker; all of it is kept when nothing does."""
    below = step = exc.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == _WORKER:
            below = step.tb_next
        step = step.tb_next
    return exc.with_traceback(below) if below is not None else exc


def _place(cause: BaseException) -> str:
    """Return ``file:line in function``: the innermost frame of a user, or of anybody when no user's code took part."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if _is_users(frame)]
    if not own and isinstance(cause, WaitTimeout):
        return ""  # its message says who kept whom waiting
    found = own or frames
    return f"{found[-1].filename}:{found[-1].lineno} in {found[-1].name}" if found else ""


def _is_users(frame: FrameSummary) -> bool:
    return not frame.filename.startswith(_NOT_OF_USERS)
