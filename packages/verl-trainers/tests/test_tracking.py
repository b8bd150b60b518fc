"""Trackers around the loop: one that fails, blocks or does not start, the file, and the line on the terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import families, load_plugin
from verl_contracts.testing.suites.tracker import TrackerSuite
from verl_contracts.tracking import RunEnd, TrackedRun, Tracker
from verl_trainers import recipes
from verl_trainers.config.load import resolve_config
from verl_trainers.config.schema import TrainerConfig
from verl_trainers.tracking.guard import MAX_WAITING, GuardedTracker
from verl_trainers.tracking.jsonl import JsonlTracker
from verl_trainers.tracking.progress import ProgressLine
from verl_trainers.tracking.run import build_tracker, tracked
from verl_trainers.tracking.tree import flat, plain, plain_fields

RUN = TrackedRun(name="r1", run_dir="unused", total_steps=10)
FINISHED = RunEnd(outcome="finished", summary={"steps": 2})


class TestJsonl(TrackerSuite):
    def tracker(self) -> JsonlTracker:
        return JsonlTracker()

    def recorded(self, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        values: dict[str, dict[int, float]] = {}
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            step = row.pop("step")
            for name, value in row.items():
                if value is not None:
                    values.setdefault(name, {})[step] = value
        return values

    def kept(self, run_dir: Path) -> str | None:
        return None


class Recorder:
    """Keeps what it is told."""

    def __init__(self, note: str = "") -> None:
        self.note = note
        self.calls: list[object] = []
        self.threads: set[int] = set()

    def start(self, run: TrackedRun, /) -> None:
        self.calls.append(run)
        self.threads.add(threading.get_ident())

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        self.calls.append((step, metrics))
        self.threads.add(threading.get_ident())

    def close(self, end: RunEnd, /) -> None:
        self.calls.append(end)
        self.threads.add(threading.get_ident())


class Failing(Recorder):
    """Raises for every second step."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        if step % 2:
            raise ConnectionError(f"step {step} refused\nsecond line")
        super().log(step, metrics)


class Blocking(Recorder):
    """Does not come back from `log` until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        self.entered.set()
        self.go.wait(60.0)
        super().log(step, metrics)


class NeverStarts(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def start(self, run: TrackedRun, /) -> None:
        self.go.wait(60.0)


class CannotStart(Recorder):
    def start(self, run: TrackedRun, /) -> None:
        raise ConnectionError("no route to host")


class Leaving(Recorder):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        raise SystemExit(3)

    def close(self, end: RunEnd, /) -> None:
        raise OSError("disk full")


def guarded(tracker: Tracker, *, limit_s: float = 20.0) -> GuardedTracker:
    guard = GuardedTracker("mine", tracker, limit_s=limit_s)
    guard.start(RUN)
    return guard


def test_calls_arrive_in_order_on_one_other_thread() -> None:
    recorder = Recorder()
    guard = guarded(recorder)
    metrics = {"a": 1.0}
    guard.log(1, metrics)
    metrics["a"] = 5.0
    guard.log(2, metrics)
    guard.close(FINISHED)
    assert recorder.calls == [RUN, (1, {"a": 1.0}), (2, {"a": 5.0}), FINISHED]
    assert len(recorder.threads) == 1
    assert threading.get_ident() not in recorder.threads
    assert guard.report.as_json() == {"name": "mine", "written": 2, "failed": 0, "lost": 0, "error": None}


def test_thread_ends_with_the_run() -> None:
    guard = guarded(Recorder())
    (thread,) = [each for each in threading.enumerate() if each.name == "tracker mine"]
    guard.close(FINISHED)
    thread.join(20.0)
    assert not thread.is_alive()


def test_failures_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Failing()
    guard = guarded(recorder)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 11):
            guard.log(step, {"a": 1.0})
        guard.close(FINISHED)
    assert (guard.report.written, guard.report.failed, guard.report.lost) == (5, 5, 0)
    assert guard.report.error == "ConnectionError: step 1 refused"
    assert recorder.calls[-1] is FINISHED
    (warning,) = caplog.records
    assert "the tracker 'mine' did not record step 1: ConnectionError: step 1 refused" in warning.message
    assert "further failures are only counted" in warning.message


def test_a_tracker_that_blocks_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Blocking()
    guard = guarded(tracker, limit_s=0.2)
    guard.log(0, {"a": 0.0})
    assert tracker.entered.wait(20.0)
    began = time.monotonic()
    for step in range(1, MAX_WAITING + 11):
        guard.log(step, {"a": 1.0})
    assert time.monotonic() - began < 5.0
    assert guard.report.lost == 10
    guard.close(FINISHED)
    assert time.monotonic() - began < 10.0
    assert guard.report.lost >= MAX_WAITING
    assert len(caplog.records) == 1
    tracker.go.set()


def test_end_that_runs_out_of_time_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Blocking()
    guard = guarded(tracker, limit_s=0.1)
    guard.log(1, {"a": 1.0})
    guard.close(FINISHED)
    assert guard.report.error == "TimeoutError: it took more than 0.1 s (trainer.logger_limit_s)"
    assert "did not record the end of the run" in caplog.text
    tracker.go.set()


def test_even_leaving_the_process_is_only_counted() -> None:
    guard = guarded(Leaving())
    guard.log(1, {"a": 1.0})
    guard.log(2, {"a": 1.0})
    guard.close(FINISHED)
    guard.close(FINISHED)
    assert guard.report.failed == 2
    assert guard.report.error == "SystemExit: 3"


def test_what_comes_after_the_end_or_before_the_start_is_ignored() -> None:
    recorder = Recorder()
    guard = GuardedTracker("mine", recorder, limit_s=20.0)
    guard.log(1, {"a": 1.0})
    guard.close(FINISHED)
    assert recorder.calls == []
    guard.start(RUN)
    guard.close(FINISHED)
    guard.log(1, {"a": 1.0})
    assert recorder.calls == [RUN, FINISHED]


def test_a_tracker_that_does_not_start_refuses_the_run_in_its_own_words() -> None:
    guard = GuardedTracker("mine", CannotStart(), limit_s=20.0)
    with pytest.raises(ConfigError, match=r"trainer\.logger: the tracker 'mine' did not start: no route to host"):
        guard.start(RUN)
    slow = NeverStarts()
    guard = GuardedTracker("slow", slow, limit_s=0.1)
    with pytest.raises(ConfigError, match=r"it took more than 0\.1 s \(trainer\.logger_limit_s\)"):
        guard.start(RUN)
    guard.close(FINISHED)
    slow.go.set()


ENDS: list[RunEnd] = []


class Ending(Recorder):
    def close(self, end: RunEnd, /) -> None:
        ENDS.append(end)


@pytest.mark.parametrize(
    ("raised", "end"),
    [
        (None, RunEnd(outcome="finished", summary={"steps": 3})),
        (ValueError("first\nsecond"), RunEnd(outcome="failed", error="ValueError: first")),
        (KeyboardInterrupt(), RunEnd(outcome="interrupted")),
    ],
    ids=["finished", "failed", "interrupted"],
)
def test_each_tracker_learns_how_the_run_ended(raised: BaseException | None, end: RunEnd, tmp_path: Path) -> None:
    ENDS.clear()
    run = replace(RUN, run_dir=str(tmp_path))
    config = TrainerConfig(logger=("one", "two"), logger_options={"two": {"note": "x"}})

    def block() -> list[object]:
        with tracked((Ending, Ending), config, run, progress=None) as tracking:
            tracking.trackers[1].log(1, {"a": 1.0})
            tracking.summary = {"steps": 3}
            if raised is not None:
                raise raised
        return list(tracking.reports())

    if raised is None:
        assert [row["name"] for row in block() if isinstance(row, dict)] == ["jsonl", "one", "two"]
    else:
        with pytest.raises(type(raised)):
            block()
    assert [end] * 2 == ENDS


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ((), ()),
        (("mine",), (Recorder,)),
        (("mine", "jsonl"), (Recorder, JsonlTracker)),
        (("verl_trainers.tracking.jsonl.JsonlTracker",), (JsonlTracker,)),
    ],
    ids=["none", "not named", "named", "by class path"],
)
def test_metrics_are_in_the_file_once_whether_or_not_it_is_named(
    names: tuple[str, ...], classes: tuple[type[Tracker], ...], tmp_path: Path
) -> None:
    config = TrainerConfig(logger=names)
    with tracked(classes, config, replace(RUN, run_dir=str(tmp_path)), progress=None) as tracking:
        for tracker in tracking.trackers:
            tracker.log(1, {"a": 1.0})
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "a": 1.0}
    ]


def test_trackers_before_one_that_cannot_start_are_closed(tmp_path: Path) -> None:
    ENDS.clear()
    config = TrainerConfig(logger=("one", "two"))
    with (
        pytest.raises(ConfigError, match="'two' did not start"),
        tracked((Ending, CannotStart), config, replace(RUN, run_dir=str(tmp_path)), progress=None),
    ):
        raise AssertionError("must not run")
    assert [end.outcome for end in ENDS] == ["failed"]


def test_options_reach_the_tracker_that_they_name() -> None:
    built = build_tracker(Recorder, TrainerConfig(logger_options={"mine": {"note": "x"}, "other": {}}), "mine")
    assert isinstance(built, Recorder)
    assert built.note == "x"
    with pytest.raises(ConfigError, match=r"trainer\.logger_options\.mine\.note2: unknown option; nearest: 'note'"):
        build_tracker(Recorder, TrainerConfig(logger_options={"mine": {"note2": "x"}}), "mine")
    with pytest.raises(ConfigError, match=r"trainer\.logger_options\.mine: must be options"):
        build_tracker(Recorder, TrainerConfig(logger_options={"mine": 3}), "mine")


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "alembic")],
)
def test_a_missing_library_is_said_with_its_extra_before_anything_starts(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for present in ("mlflow", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, present, ModuleType(present))
    monkeypatch.setitem(sys.modules, module, None)
    cls = load_plugin(families.TRACKER, name, key="trainer.logger")
    with pytest.raises(ConfigError, match=rf"needs the module '{module}'.*pip install 'verl-trainers\[{name}\]'"):
        build_tracker(cls, TrainerConfig(), name)


def test_wrong_options_are_found_by_the_check_of_the_configuration(tmp_path: Path) -> None:
    options = "trainer.logger_options={jsonl: {path: x}, wnadb: {}}"
    recipe = Path(recipes.__file__).parent / "quickstart.yaml"
    with pytest.raises(ConfigError) as caught:
        resolve_config(recipe, [options], run_dir=str(tmp_path))
    assert "trainer.logger_options.jsonl.path: unknown option; JsonlTracker takes none" in str(caught.value)
    assert "trainer.logger_options.wnadb: options of a tracker that trainer.logger does not choose" in str(caught.value)


def test_numbers_that_are_not_finite_are_null_and_lines_are_there_at_once(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(TrackedRun(name="r", run_dir=str(tmp_path), total_steps=1))
    tracker.log(1, {"loss": 0.5, "grad_norm": float("nan")})
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row == {"step": 1, "loss": 0.5, "grad_norm": None}
    tracker.close(FINISHED)


def test_configuration_becomes_plain_values() -> None:
    tree = plain_fields(TrainerConfig(logger=("a", "b"), logger_options={"a": {"path": Path("x")}}))
    assert tree["logger"] == ["a", "b"]
    assert tree["logger_options"] == {"a": {"path": "x"}}
    assert json.loads(json.dumps(tree)) == tree
    assert dict(flat({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": None})) == {
        "a.b": 1,
        "a.c": "{}",
        "d": "[1, 2]",
        "e": None,
    }
    assert plain({1: (2, 3)}) == {"1": [2, 3]}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError("nobody reads")


def progress(stream: io.StringIO | None, *, total_steps: int) -> ProgressLine:
    line = ProgressLine(stream=stream)
    line.start(TrackedRun(name="r", run_dir="unused", total_steps=total_steps))
    return line


def test_progress_is_a_few_lines_in_a_file() -> None:
    stream = io.StringIO()
    line = progress(stream, total_steps=100)
    line.log(0, {"val/score": 0.25})
    for step in range(1, 101):
        line.log(step, {"reward": 0.5, "staleness/max": 2.0, "samples_per_s": 700.0})
    line.close(FINISHED)
    shown = stream.getvalue().splitlines()
    assert shown[0] == "step 0/100  validation 0.250"
    assert shown[1].startswith("step 1/100  reward 0.500  staleness 2  700 samples/s")
    assert len(shown) == 22
    assert "\r" not in stream.getvalue()


def test_progress_is_one_line_on_a_terminal() -> None:
    stream = Terminal()
    line = progress(stream, total_steps=10)
    for step in range(1, 11):
        line.log(step, {"reward": 0.5})
    assert stream.getvalue().count("\n") == 0
    line.log(10, {"val/score": 1.0})
    line.close(FINISHED)
    line.close(FINISHED)
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("stream", [Broken(), None], ids=["broken", "none"])
def test_progress_that_nobody_reads_stops_nothing(stream: io.StringIO | None) -> None:
    line = progress(stream, total_steps=2)
    line.log(1, {"reward": 0.5})
    line.log(2, {"reward": 0.6, "val/score": 0.7})
    line.close(FINISHED)
