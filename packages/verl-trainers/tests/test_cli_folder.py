"""What a run leaves behind: the folder and the event log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_contracts.clock import SystemClock
from verl_contracts.errors import ConfigError
from verl_trainers.run_folder import JsonlEvents, RunFolder


class Clock(SystemClock):
    """A clock that stands still until it is told otherwise."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_700_000_000.0 + self.time


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    folder = RunFolder.create(out)
    folder.write_summary({"steps": 1})
    folder.write_config("data: {}\n")
    folder.model.mkdir()
    (folder.model / "config.json").touch()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds a previous run; add --overwrite"):
        RunFolder.create(out)
    RunFolder.create(out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [".verl-run", "logs", "notes.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_wrote_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds files that no run wrote"):
        RunFolder.create(tmp_path, overwrite=overwrite)
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.create(tmp_path / "thesis.txt", overwrite=overwrite)


def test_a_summary_is_complete_or_absent(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(TypeError):
        folder.write_summary({"steps": object()})  # type: ignore[dict-item]
    assert not folder.summary.exists()
    folder.write_summary({"steps": 3})
    assert json.loads(folder.summary.read_text()) == {"steps": 3}
    assert not folder.summary.with_suffix(".partial").exists()


def test_half_a_character_hides_no_error(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_error("what happened: \ud800")
    assert (folder.path / "error.txt").read_text() == "what happened: \\ud800"
    code = (
        "import logging, pathlib, sys; from verl_trainers.commands.run import _log_to; "
        "_log_to(pathlib.Path(sys.argv[1])); logging.error('what happened: \\ud800')"
    )
    log = folder.path / "run.log"
    command = [sys.executable, "-c", code, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Logging error" not in done.stderr
    assert log.read_text().endswith("what happened: \\ud800\n")


def test_events_are_on_disk_within_a_second_and_at_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    events = JsonlEvents(tmp_path / "events.jsonl", clock=clock)
    events.emit("first", {"step": 1})
    clock.time = 1.5
    events.emit("second", {"uids": ["0-1-0"]})
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(row["name"], row["at"]) for row in written] == [("first", 0.0), ("second", 1.5)]
    assert written[1]["fields"] == {"uids": ["0-1-0"]}
    assert [row["time"] for row in written] == [1_700_000_000.0, 1_700_000_001.5]
    events.emit("odd", {"value": object()})  # type: ignore[dict-item]
    assert "event odd was not written" in caplog.text
    events.emit("last", {})
    events.close()
    events.close()
    events.emit("too late", {})
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 3


def test_a_folder_in_which_a_run_is_going_on_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = (
        "import sys, pathlib; from verl_trainers.run_folder import RunFolder; "
        "RunFolder.create(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="a run is going on in it"):
            RunFolder.create(out, overwrite=True)
        other.kill()
    RunFolder.create(out, overwrite=True)


def test_a_refused_start_leaves_no_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config("data: {}\n")
    folder.discard()
    assert not (tmp_path / "run").exists()
