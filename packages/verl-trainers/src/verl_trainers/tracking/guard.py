"""A tracker behind a thread of its own, so that neither its errors nor its waiting reach the training loop.

It owns the thread, what waits to be written, and the account of what was not. It prevents a metrics service that is
down, or a terminal that nobody reads, from ending or holding up a run.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from verl_contracts.events import JsonValue
    from verl_contracts.tracking import RunEnd, TrackedRun, Tracker

__all__ = ["GuardedTracker", "TrackerReport"]

_log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Calls that may wait for a slow tracker; what comes on top is lost, and counted."""


@dataclass(slots=True)
class TrackerReport:
    """What became of the calls to one tracker."""

    name: str
    written: int = 0
    failed: int = 0
    """Calls that raised."""
    lost: int = 0
    """Calls that were never made: too many waited, or the end came first."""
    error: str | None = None
    """What was raised or ran out first; None when nothing was."""

    def as_json(self) -> Mapping[str, JsonValue]:
        """Return the report as it stands in the summary."""
        return {
            "name": self.name,
            "written": self.written,
            "failed": self.failed,
            "lost": self.lost,
            "error": self.error,
        }


class GuardedTracker:
    """Calls one tracker, in order, on a daemon thread. `log` neither waits nor raises."""

    def __init__(self, name: str, tracker: Tracker, *, limit_s: float) -> None:
        """Begin nothing. `limit_s` is the longest that `start` and `close` may take, each."""
        self.report = TrackerReport(name=name)
        """Complete once `close` has returned."""
        self._tracker = tracker
        self._limit_s = limit_s
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, run: TrackedRun, /) -> None:
        """Start the tracker. Raises `ConfigError`, with the tracker's own words, when it does not start in time."""
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.report.name}", daemon=True)
        self._thread.start()
        problem = self._wait_for(partial(self._tracker.start, run))
        if problem is not None:
            self._closed = isinstance(problem, TimeoutError)  # its thread is stuck, and would not close it either
            raise ConfigError(f"trainer.logger: the tracker {self.report.name!r} did not start: {problem}") from problem

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Have the metrics written soon."""
        if self._thread is None or self._closed:
            return
        if self._calls.qsize() >= MAX_WAITING:
            self.report.lost += 1
            self._note(TimeoutError(f"{MAX_WAITING} calls wait for it"), f"step {step}")
            return
        self._calls.put(partial(self._write, step, dict(metrics)))

    def close(self, end: RunEnd, /) -> None:
        """Have everything written and the tracker closed, and end the thread. Never raises; idempotent."""
        if self._thread is None or self._closed:
            return
        self._closed = True
        problem = self._wait_for(partial(self._tracker.close, end))
        if problem is not None:
            self.report.lost += self._calls.qsize()
            self._note(problem, "the end of the run")
        self._calls.put(_leave)

    def _wait_for(self, call: Callable[[], None]) -> BaseException | None:
        """Make `call` on the thread, after what waits there already. Return what went wrong."""
        done: Future[None] = Future()
        self._calls.put(partial(_settle, done, call))
        try:
            return done.exception(timeout=self._limit_s)
        except TimeoutError:
            return TimeoutError(f"it took more than {self._limit_s:g} s (trainer.logger_limit_s)")

    def _work(self) -> None:
        try:
            while True:
                self._calls.get()()  # wait: for the next call; the last one ends the thread
        except _Leave:
            return

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._tracker.log(step, metrics)
        except (Exception, SystemExit) as exc:  # a tracker's failure must not end a run
            self.report.failed += 1
            self._note(exc, f"step {step}")
        else:
            self.report.written += 1

    def _note(self, problem: BaseException, what: str) -> None:
        """Warn of the first problem and only keep count of further ones."""
        if self.report.error is None:
            self.report.error = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            _log.warning(
                "the tracker %r did not record %s: %s; training goes on, and further failures are only counted",
                self.report.name,
                what,
                self.report.error,
                exc_info=problem,
            )


class _Leave(Exception):
    """Ends the thread."""


def _leave() -> None:
    raise _Leave


def _settle(done: Future[None], call: Callable[[], None]) -> None:
    """Make `call`, and hand its outcome to whoever waits."""
    try:
        call()
    except (Exception, SystemExit) as exc:
        done.set_exception(exc)
    else:
        done.set_result(None)


if TYPE_CHECKING:

    def _is_tracker(x: GuardedTracker) -> Tracker:
        return x
