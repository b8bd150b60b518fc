"""Trackers with the real libraries, read back from the files that they leave: the session tests-trainers-trackers."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pytest

from verl_contracts.errors import ConfigError
from verl_contracts.testing.suites.tracker import TrackerSuite
from verl_contracts.tracking import RunEnd, TrackedRun
from verl_trainers.tracking.mlflow import MlflowTracker
from verl_trainers.tracking.tensorboard import TensorboardTracker
from verl_trainers.tracking.wandb import WandbTracker

pytestmark = [
    pytest.mark.trackers,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),  # mlflow's own use of sqlalchemy
]


class Record(Protocol):
    """A record of wandb's log; its fields are those of wandb's protobuf, which has no types here."""

    def WhichOneof(self, group: str, /) -> str: ...  # noqa: N802  protobuf's name

    def __getattr__(self, name: str) -> Any: ...


INTERRUPTED = RunEnd(outcome="interrupted")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def run_of(folder: Path) -> TrackedRun:
    return TrackedRun(name="r1", run_dir=str(folder), total_steps=3, config={"trainer": {"seed": 7}})


class TestTensorboard(TrackerSuite):
    def tracker(self) -> TensorboardTracker:
        return TensorboardTracker()

    def recorded(self, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        values: dict[str, dict[int, float]] = {}
        for name, step, value, _ in events(run_dir):
            if value is not None and math.isfinite(value):
                values.setdefault(name, {})[step] = value
        return values

    def kept(self, run_dir: Path) -> str | None:
        return "".join(text for _, _, _, text in events(run_dir))


def events(run_dir: Path) -> Iterator[tuple[str, int, float | None, str]]:
    """Yield name, step, value and text of everything in TensorBoard's event files."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in sorted((run_dir / "tensorboard").iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value, ""
                else:
                    yield value.tag, event.step, None, b"".join(value.tensor.string_val).decode()


class TestWandb(TrackerSuite):
    def tracker(self) -> WandbTracker:
        return WandbTracker()

    def recorded(self, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        values: dict[str, dict[int, float]] = {}
        for record in records(run_dir):
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name, value = item.key or ".".join(item.nested_key), json.loads(item.value_json)
                    if not name.startswith("_") and isinstance(value, (int, float)) and math.isfinite(value):
                        values.setdefault(name, {})[record.history.step.num] = value
        return values

    def kept(self, run_dir: Path) -> str | None:
        return "".join(str(record) for record in records(run_dir))


def records(run_dir: Path) -> Iterator[Record]:
    """Yield the records of wandb's transaction log: a LevelDB log, in blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


class TestMlflow(TrackerSuite):
    def tracker(self) -> MlflowTracker:
        return MlflowTracker()

    def recorded(self, run_dir: Path) -> Mapping[str, Mapping[int, float]]:
        values: dict[str, dict[int, float]] = {}
        for name, step, value, is_nan in rows(run_dir, "select key, step, value, is_nan from metrics"):
            if not is_nan and abs(float(str(value))) < 1e300:
                values.setdefault(str(name), {})[int(str(step))] = float(str(value))
        return values

    def kept(self, run_dir: Path) -> str | None:
        params = rows(run_dir, "select key, value from params")
        return str([*params, *rows(run_dir, "select key, value from tags")])


def rows(run_dir: Path, query: str) -> list[tuple[object, ...]]:
    """Return what the database of MLflow says."""
    with closing(sqlite3.connect(run_dir / "mlflow" / "mlflow.db")) as database:
        return list(database.execute(query))


@pytest.mark.parametrize(
    ("outcome", "status"), [("finished", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")]
)
def test_mlflow_run_ends_as_the_run_did(outcome: str, status: str, tmp_path: Path) -> None:
    ends = (RunEnd(outcome="finished"), RunEnd(outcome="failed", error="e"), INTERRUPTED)
    tracker = MlflowTracker(experiment="mine", name="other")
    tracker.start(run_of(tmp_path))
    tracker.close(next(end for end in ends if end.outcome == outcome))
    query = "select runs.name, status, experiments.name from runs join experiments using (experiment_id)"
    assert rows(tmp_path, query) == [("other", status, "mine")]


def test_mlflow_store_may_be_shared_by_runs_and_odd_names_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    uri = f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"
    for number in (1, 2):
        tracker = MlflowTracker(tracking_uri=uri)
        tracker.start(TrackedRun(name=f"r{number}", run_dir=str(tmp_path), total_steps=1))
        tracker.log(1, {"sample/tool (calls)+1": 2.0})
        tracker.close(RunEnd(outcome="finished"))
    assert rows(tmp_path, "select name from runs order by name") == [("r1",), ("r2",)]
    assert rows(tmp_path, "select distinct key from metrics") == [("sample/tool _calls__1",)]


def test_tensorboard_runs_may_share_a_folder(tmp_path: Path) -> None:
    for name in ("r1", "r2"):
        tracker = TensorboardTracker(log_dir=str(tmp_path / "tensorboard"))
        tracker.start(TrackedRun(name=name, run_dir=str(tmp_path), total_steps=1))
        tracker.log(1, {"a": 1.0})
        tracker.close(INTERRUPTED)
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == ["r1", "r2"]


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("failed", 1), ("interrupted", 130)])
def test_wandb_run_ends_as_the_run_did(outcome: str, code: int, tmp_path: Path) -> None:
    ends = (RunEnd(outcome="finished"), RunEnd(outcome="failed", error="e"), INTERRUPTED)
    tracker = WandbTracker(project="mine", name="other", tags=["x"], group="g")
    tracker.start(run_of(tmp_path))
    tracker.close(next(end for end in ends if end.outcome == outcome))
    found = {record.WhichOneof("record_type"): record for record in records(tmp_path)}
    run = found["run"].run
    assert (run.project, run.display_name, list(run.tags), run.run_group) == ("mine", "other", ["x"], "g")
    assert found["exit"].exit.exit_code == code


def test_wandb_heeds_its_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = WandbTracker()
    tracker.start(run_of(tmp_path))
    tracker.log(1, {"a": 1.0})
    tracker.close(RunEnd(outcome="finished"))
    assert not list(tmp_path.rglob("*.wandb"))
    offline = WandbTracker(mode="offline")
    offline.start(run_of(tmp_path))
    offline.close(RunEnd(outcome="finished"))
    assert list(tmp_path.rglob("*.wandb"))


def test_online_without_a_key_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(Exception, match=r"(?i)api.key|login"):
        WandbTracker(mode="online").start(run_of(tmp_path))


def test_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="mode must be one of online, offline, disabled, got 'ofline'"):
        WandbTracker(mode="ofline")  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ConfigError, match="WANDB_MODE must be one of"):
        WandbTracker()
