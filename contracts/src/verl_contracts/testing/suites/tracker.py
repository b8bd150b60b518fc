# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of `Tracker`: what was logged can be read back, whatever the numbers, the thread and the end.

The suite reads with the accessors of the subclass, which must not use the tracker under test.
"""

from __future__ import annotations

import abc
import copy
import threading
from typing import TYPE_CHECKING

import pytest

from verl_contracts.plugins import check_plugin, families
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.tracking import RunEnd, TrackedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verl_contracts.events import JsonValue
    from verl_contracts.tracking import Tracker

__all__ = ["TrackerSuite"]

_CONFIG: Mapping[str, JsonValue] = {
    "data": {"train_files": ["a.jsonl"], "shuffle": True, "system_prompt": None},
    "actor": {"optim": {"lr": 0.0625}, "note": "ü" * 50},
    "empty": {},
}
_FINISHED = RunEnd(
    outcome="finished", summary={"steps": 3, "val_last": 0.75, "val_first": None, "rejects": [{"uid": "0-1-0"}]}
)


class TrackerSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `tracker`, `recorded` and `kept`."""

    @abc.abstractmethod
    def tracker(self) -> Tracker:
        """Return a new tracker that writes into the run folder."""

    @abc.abstractmethod
    def recorded(self, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        """Return name → step → value of everything that a closed tracker left, finite values only."""

    @abc.abstractmethod
    def kept(self, run_dir: Path) -> str | None:
        """Return all texts that a closed tracker left of configuration, summary and error, in any form.

        None says that it leaves them to the files of the run folder.
        """

    def play(
        self,
        run_dir: Path,
        rows: Sequence[tuple[int, Mapping[str, float]]],
        *,
        end: RunEnd = _FINISHED,
        closings: int = 1,
    ) -> None:
        """Start a tracker, log `rows`, and close it; all on one thread that is not the constructor's."""
        tracker = self.tracker()

        def calls() -> None:
            tracker.start(self.run_of(run_dir))
            for step, metrics in rows:
                tracker.log(step, metrics)
            for _ in range(closings):
                tracker.close(end)

        self.elsewhere(calls)

    def run_of(self, run_dir: Path) -> TrackedRun:
        """Return what the tracker is told at the start."""
        return TrackedRun(name="r1", run_dir=str(run_dir), total_steps=3, config=_CONFIG)

    def elsewhere(self, calls: Callable[[], None]) -> None:
        """Run `calls` on another thread, within the limit, and raise what it raised."""
        raised: list[BaseException] = []

        def body() -> None:
            try:
                calls()
            except BaseException as exc:
                raised.append(exc)

        thread = threading.Thread(target=body, name="tracker under test", daemon=True)
        thread.start()
        thread.join(self.limit_s)
        assert not thread.is_alive(), f"the tracker's calls took more than {self.limit_s} s"
        if raised:
            raise raised[0]

    def test_class_meets_the_contract(self) -> None:
        check_plugin(families.TRACKER, type(self.tracker()), key="trainer.logger")

    def test_constructing_begins_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        threads = threading.active_count()
        self.tracker()
        assert list(tmp_path.iterdir()) == []
        assert threading.active_count() == threads

    def test_every_value_can_be_read_back_under_its_name_and_step(self, tmp_path: Path) -> None:
        rows = [(step, {"reward": step / 4, "staleness/max": 2.0, "seconds/sync/transfer": 1.5}) for step in (1, 2, 3)]
        self.play(tmp_path, rows)
        assert self.recorded(tmp_path) == {
            "reward": {1: 0.25, 2: 0.5, 3: 0.75},
            "staleness/max": dict.fromkeys((1, 2, 3), 2.0),
            "seconds/sync/transfer": dict.fromkeys((1, 2, 3), 1.5),
        }

    def test_one_step_may_come_twice_with_other_names(self, tmp_path: Path) -> None:
        self.play(tmp_path, [(0, {"val/score": 0.25}), (1, {"reward": 0.5}), (1, {"val/score": 0.75})])
        assert self.recorded(tmp_path) == {"val/score": {0: 0.25, 1: 0.75}, "reward": {1: 0.5}}

    def test_name_may_appear_late_and_steps_may_be_left_out(self, tmp_path: Path) -> None:
        self.play(tmp_path, [(1, {"a": 1.0}), (7, {"a": 2.0, "discards/stale": 1.0})])
        assert self.recorded(tmp_path) == {"a": {1: 1.0, 7: 2.0}, "discards/stale": {7: 1.0}}

    @pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
    def test_odd_value_costs_no_other_value(self, odd: float, tmp_path: Path) -> None:
        self.play(tmp_path, [(1, {"before": 1.0, "odd": odd, "after": 2.0}), (2, {"odd": 3.0})])
        assert self.recorded(tmp_path) == {"before": {1: 1.0}, "after": {1: 2.0}, "odd": {2: 3.0}}

    def test_long_run_is_complete(self, tmp_path: Path) -> None:
        rows = [(step, {f"m/{column}": float(step * column) for column in range(40)}) for step in range(1, 61)]
        self.play(tmp_path, rows)
        assert self.recorded(tmp_path) == {
            f"m/{column}": {step: float(step * column) for step in range(1, 61)} for column in range(40)
        }

    def test_mappings_of_the_caller_are_not_changed(self, tmp_path: Path) -> None:
        config, metrics = copy.deepcopy(_CONFIG), {"a": 1.0}
        self.play(tmp_path, [(1, metrics)])
        assert config == _CONFIG
        assert metrics == {"a": 1.0}

    def test_close_may_be_repeated(self, tmp_path: Path) -> None:
        self.play(tmp_path, [(1, {"a": 1.0})], closings=3)
        assert self.recorded(tmp_path) == {"a": {1: 1.0}}

    def test_close_is_harmless_before_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        self.tracker().close(RunEnd(outcome="interrupted"))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("outcome", ["finished", "failed", "interrupted"])
    def test_values_are_there_whatever_the_outcome(self, outcome: str, tmp_path: Path) -> None:
        ends = (_FINISHED, RunEnd(outcome="failed", error="RunFailed: no"), RunEnd(outcome="interrupted"))
        (end,) = (end for end in ends if end.outcome == outcome)
        self.play(tmp_path, [(1, {"a": 1.0})], end=end)
        assert self.recorded(tmp_path) == {"a": {1: 1.0}}

    def test_configuration_summary_and_error_are_kept(self, tmp_path: Path) -> None:
        (tmp_path / "good").mkdir()
        (tmp_path / "bad").mkdir()
        self.play(tmp_path / "good", [(1, {"a": 1.0})])
        text = self.kept(tmp_path / "good")
        if text is None:
            pytest.skip("the tracker declares that it leaves texts to the run folder")
        for part in ("lr", "0.0625", "a.jsonl", "val_last", "0.75"):
            assert part in text, f"{part!r} is not in {text[:2000]!r}"
        self.play(tmp_path / "bad", [(1, {"a": 1.0})], end=RunEnd(outcome="failed", error="RunFailed: the reason"))
        assert "RunFailed: the reason" in (self.kept(tmp_path / "bad") or "")

    def test_two_runs_in_two_folders_stay_apart(self, tmp_path: Path) -> None:
        for number in (1, 2):
            (tmp_path / str(number)).mkdir()
            self.play(tmp_path / str(number), [(number, {"a": float(number)})])
        assert self.recorded(tmp_path / "1") == {"a": {1: 1.0}}
        assert self.recorded(tmp_path / "2") == {"a": {2: 2.0}}
