"""Options of trackers named by class path, in every form that people write, and who is blamed for a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from cli_cases import STANDINS

from verl_contracts.tracking import RunEnd, TrackedRun
from verl_trainers.cli import main
from verl_trainers.config.load import load_config
from verl_trainers.tracking.options import sort_options
from verl_trainers.tracking.run import build_tracker

PATH = "test_tracking_options.FileTracker"
HERE = "test_tracking_options:FileTracker"


class FileTracker:
    def __init__(self, *, file: str = "metrics.csv", sep: str = ",") -> None:
        self.file = file

    def start(self, run: TrackedRun, /) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        pass

    def close(self, end: RunEnd, /) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "override"),
    [
        (PATH, f"trainer.logger_options.{PATH}.file=x.csv"),
        (PATH, "trainer.logger_options.FileTracker.file=x.csv"),
        (PATH, f"trainer.logger_options={{{PATH}: {{file: x.csv}}}}"),
        (HERE, f"trainer.logger_options.{PATH}.file=x.csv"),
        (HERE, f"trainer.logger_options.{HERE}.file=x.csv"),
        (HERE, "trainer.logger_options.FileTracker.file=x.csv"),
    ],
)
def test_options_reach_a_tracker_named_by_class_path(name: str, override: str) -> None:
    config = load_config(None, [f"trainer.logger=[{name}]", override])
    built = build_tracker(FileTracker, config.trainer, name)
    assert isinstance(built, FileTracker)
    assert built.file == "x.csv"
    assert sort_options(config.trainer.logger_options, config.trainer.logger).problems == {}


def test_what_belongs_to_no_tracker_is_said_with_a_form_that_works() -> None:
    key, text = one_problem({"FileTracker": {"file": "x"}}, ("a.FileTracker", "b.FileTracker"))
    assert key == "trainer.logger_options.FileTracker"
    assert "write for example trainer.logger_options.a.FileTracker.OPTION=VALUE" in text
    key, text = one_problem({"a": {"FileTrakcer": {"file": "x"}}}, ("a.FileTracker",))
    assert key == "trainer.logger_options.a.FileTrakcer"
    assert "Write trainer.logger_options.a.FileTracker.OPTION=VALUE" in text
    key, text = one_problem({"FileTracker": {"file": "x"}, "a": {"FileTracker": {"sep": ";"}}}, ("a.FileTracker",))
    assert "a second time; they stand at trainer.logger_options.FileTracker" in text


def one_problem(given: Mapping[str, object], chosen: tuple[str, ...]) -> tuple[str, str]:
    ((key, text),) = sort_options(given, chosen).problems.items()
    return key, text


@pytest.mark.parametrize(
    "override",
    [
        f"trainer.logger_options.{PATH}.fiel=x.csv",
        "trainer.logger_options.FileTracker.fiel=x.csv",
        "trainer.logger_options.FileTrakcer.file=x.csv",
        f"trainer.logger_options={{{PATH}: {{fiel: x.csv}}}}",
    ],
)
def test_the_override_is_blamed_and_not_the_recipe(
    override: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"trainer:\n  logger: [{PATH}]\n  logger_options:\n    {PATH}: {{sep: ';'}}\n")
    words = ["data.train_files=[x]", "actor_rollout_ref.model.path=x", "reward.name=copy"]
    assert main(["check", str(recipe), *STANDINS, *words, override]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "logger_options" in line]
    assert lines
    assert all(line.startswith(f"error: override {override!r}: trainer.logger_options.") for line in lines), lines


def test_two_wrong_options_of_one_tracker_are_two_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["trainer.logger_options.FileTracker.fiel=x", "trainer.logger_options.FileTracker.spe=x"]
    assert main(["run", "quickstart", *STANDINS, f"trainer.logger=[{PATH}]", *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error"] * 2
    assert all(word in line for word, line in zip(("fiel", "spe"), lines, strict=True))
