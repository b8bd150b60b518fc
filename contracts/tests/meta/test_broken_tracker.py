"""The suite of trackers accepts the shortest tracker that meets the contract, and rejects each that breaks a rule."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from broken import Broken, name_of, reject

from verl_contracts.testing.suites.tracker import TrackerSuite
from verl_contracts.tracking import RunEnd, TrackedRun, Tracker


class OneFile:
    """Collects everything, and writes it once at the end."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.values: dict[str, dict[int, float]] = {}

    def start(self, run: TrackedRun, /) -> None:
        self.run = run

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, {})[step] = value

    def close(self, end: RunEnd, /) -> None:
        if self.run is not None:
            texts = [self.run.config, end.outcome, end.summary, end.error]
            Path(self.run.run_dir, "all.json").write_text(json.dumps({"values": self.values, "texts": texts}))
            self.run = None


class OneFileSubject(TrackerSuite):
    kind = OneFile

    def tracker(self) -> Tracker:
        return self.kind()

    def recorded(self, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        values: dict[str, dict[str, float]] = json.loads((run_dir / "all.json").read_text())["values"]
        finite = {
            name: {int(step): value for step, value in row.items() if abs(value) < 1e300}
            for name, row in values.items()
        }
        return {name: row for name, row in finite.items() if row}

    def kept(self, run_dir: Path) -> str | None:
        return json.dumps(json.loads((run_dir / "all.json").read_text())["texts"])


class TestOneFile(OneFileSubject):
    pass


class BeginsAtOnce(OneFile):
    def __init__(self) -> None:
        super().__init__()
        Path("begun").touch()


class LastStepOnly(OneFile):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        self.values = {name: {step: value} for name, value in metrics.items()}


class OneRowPerStep(OneFile):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        for name in metrics:
            self.values.setdefault(name, {})
        for row in self.values.values():
            row.pop(step, None)
        super().log(step, metrics)


class FirstNamesOnly(OneFile):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        known = self.values or metrics
        super().log(step, {name: value for name, value in metrics.items() if name in known})


class RefusesOddValues(OneFile):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        super().log(step, {name: float(int(value * 4)) / 4 for name, value in metrics.items()})


class Buffers(OneFile):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        if step <= 50:
            super().log(step, metrics)


class TakesOver(OneFile):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        super().log(step, metrics)
        metrics["step"] = step  # type: ignore[index]


class ClosesOnce(OneFile):
    def close(self, end: RunEnd, /) -> None:
        if self.run is None:
            raise ValueError("closed already")
        super().close(end)


class WritesGoodEndsOnly(OneFile):
    def close(self, end: RunEnd, /) -> None:
        if end.outcome == "finished":
            super().close(end)


class ForgetsTheConfiguration(OneFile):
    def start(self, run: TrackedRun, /) -> None:
        super().start(TrackedRun(name=run.name, run_dir=run.run_dir, total_steps=run.total_steps))


class ForgetsTheError(OneFile):
    def close(self, end: RunEnd, /) -> None:
        super().close(RunEnd(outcome=end.outcome, summary=end.summary))


class OneForAll(OneFile):
    shared: ClassVar[dict[str, dict[int, float]]] = {}

    def start(self, run: TrackedRun, /) -> None:
        super().start(run)
        self.values = self.shared


class MainThreadOnly(OneFile):
    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def start(self, run: TrackedRun, /) -> None:
        if threading.get_ident() != self.thread:
            raise RuntimeError("signal only works in main thread")
        super().start(run)


ROWS = "test_every_value_can_be_read_back_under_its_name_and_step"
TWICE = "test_one_step_may_come_twice_with_other_names"
LATE = "test_name_may_appear_late_and_steps_may_be_left_out"
TEXTS = "test_configuration_summary_and_error_are_kept"
TRACKERS = [
    Broken(kind=LastStepOnly, test=ROWS, says="AssertionError"),
    Broken(kind=OneRowPerStep, test=TWICE, says="AssertionError"),
    Broken(kind=FirstNamesOnly, test=LATE, says="AssertionError"),
    Broken(
        kind=RefusesOddValues,
        test="test_odd_value_costs_no_other_value",
        says="cannot convert float NaN",
        parameters={"odd": float("nan")},
    ),
    Broken(kind=Buffers, test="test_long_run_is_complete", says="AssertionError"),
    Broken(kind=TakesOver, test="test_mappings_of_the_caller_are_not_changed", says="AssertionError"),
    Broken(kind=ClosesOnce, test="test_close_may_be_repeated", says="closed already"),
    Broken(
        kind=WritesGoodEndsOnly,
        test="test_values_are_there_whatever_the_outcome",
        says="No such file",
        parameters={"outcome": "interrupted"},
    ),
    Broken(kind=ForgetsTheConfiguration, test=TEXTS, says="'lr' is not in"),
    Broken(kind=ForgetsTheError, test=TEXTS, says="RunFailed: the reason"),
    Broken(kind=OneForAll, test="test_two_runs_in_two_folders_stay_apart", says="AssertionError"),
    Broken(kind=MainThreadOnly, test=ROWS, says="main thread"),
]


@pytest.mark.parametrize("row", TRACKERS, ids=name_of)
def test_broken_tracker_is_rejected(row: Broken, tmp_path: Path) -> None:
    parameters = {**row.parameters, "tmp_path": tmp_path}
    reject(OneFileSubject, Broken(kind=row.kind, test=row.test, says=row.says, parameters=parameters))


@pytest.mark.parametrize("kind", [BeginsAtOnce, ClosesOnce])
def test_tracker_that_does_something_before_its_start_is_rejected(
    kind: type[OneFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = "test_constructing_begins_nothing" if kind is BeginsAtOnce else "test_close_is_harmless_before_start"
    says = "begun" if kind is BeginsAtOnce else "closed already"
    reject(
        OneFileSubject,
        Broken(kind=kind, test=test, says=says, parameters={"tmp_path": tmp_path, "monkeypatch": monkeypatch}),
    )
