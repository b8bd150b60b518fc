"""Trackers that misbehave, as a service on the network may."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from verl_contracts.tracking import RunEnd, TrackedRun


class Refusing:
    """Starts, and then takes nothing."""

    def start(self, run: TrackedRun, /) -> None:
        assert run.config["runtime"] == "local"

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        raise ConnectionError("no route to host")

    def close(self, end: RunEnd, /) -> None:
        assert end.outcome == "failed" or end.summary["mode"] == "sync"


class Stuck(Refusing):
    """Never answers."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        threading.Event().wait(3600.0)


class Unreachable(Refusing):
    """Does not even start."""

    def start(self, run: TrackedRun, /) -> None:
        raise ConnectionError("no route to host")
