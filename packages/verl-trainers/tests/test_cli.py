"""The command: what it prints, what it leaves, and its exit codes."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_cases import STANDINS

from verl_trainers import __version__
from verl_trainers.cli import main
from verl_trainers.commands.interrupts import Interrupts
from verl_trainers.config.load import load_config
from verl_trainers.recipes import toy
from verl_trainers.recipes.catalog import RECIPES, recipe_names, recipes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before, root = [signal.getsignal(number) for number in numbers], logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    for added in set(root.handlers) - set(handlers):
        added.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    toy.prepare(folder)
    rows = (folder / "train.jsonl").read_text().splitlines()
    (folder / "ten.jsonl").write_text("\n".join(rows[:10]))
    return folder


def from_files(prepared: Path, *overrides: str) -> list[str]:
    """Overrides that point the quickstart at files that are there."""
    return [
        *STANDINS,
        "prepare=null",
        f"data.train_files=[{prepared}/ten.jsonl]",
        f"data.val_files=[{prepared}/val.jsonl]",
        f"actor_rollout_ref.model.path={prepared}/model",
        *overrides,
    ]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from verl_trainers.cli import main\n"
        "try:\n    main(['run', '--help'])\nfinally:\n"
        "    assert not {'torch', 'transformers', 'omegaconf', 'ray'} & set(sys.modules), 'heavy'"
    )
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        seconds.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
        assert "--overwrite" in done.stdout
    assert min(seconds) < 0.5


def test_recipes_are_listed_and_printed_to_be_copied(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    for recipe in recipes():
        for words in (recipe.name, recipe.what.split()[0], f"last run: {recipe.last_run.split()[0]}"):
            assert words in listed
    assert main(["recipes", "show", "quickstart"]) == 0
    mine = tmp_path / "mine.yaml"
    mine.write_text(capsys.readouterr().out)
    assert load_config(mine, run_dir="/runs/1") == load_config(RECIPES / "quickstart.yaml", run_dir="/runs/1")
    assert main(["recipes", "show", "mine"]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_plugins_are_listed_with_what_offers_them_and_whether_they_can_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "outside-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 0.3\n")
    offered = "broken = outside_broken:Reward\nwrong = outside_wrong:Reward\n"
    (info / "entry_points.txt").write_text(f"[verl_contracts.reward_functions]\n{offered}")
    (tmp_path / "outside_broken.py").write_text("import a_missing_library\n")
    (tmp_path / "outside_wrong.py").write_text("class Reward:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["plugins", "--family", "reward function"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[0] for line in lines[1:]} == {"reward function"}
    (copy,) = [line for line in lines if "verl_trainers.rewards.builtin:CopyReward" in line]
    assert copy.endswith("can be used")
    assert f"verl-trainers {__version__}" in copy
    (broken,) = [line for line in lines if "outside_broken:Reward" in line]
    assert "outside 0.3" in broken
    assert "needs module 'a_missing_library', which is not installed" in broken
    (wrong,) = [line for line in lines if "outside_wrong:Reward" in line]
    assert "does not meet the contract RewardFunction" in wrong
    assert main(["plugins", "--family", "rewards"]) == 2
    assert "reward function" in capsys.readouterr().err


def test_an_unknown_recipe_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quikstart"]) == 2
    err = capsys.readouterr().err
    assert "did you mean quickstart?" in err
    assert ", ".join(recipe_names()) in err


@pytest.mark.parametrize("arguments", [["run"], ["run", "quickstart", "--what"], ["recipes", "a=b"], []])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(arguments)
    assert exit_code.value.code == 2


def test_check_says_how_the_data_end_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path
) -> None:
    short = ["data.train_batch_size=4", "trainer.total_training_steps=null"]
    overrides = from_files(prepared, *short, "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    assert main(["check", "quickstart", "--out", str(tmp_path / "run"), *overrides]) == 0
    out = capsys.readouterr().out
    assert "2 full steps" in out
    assert "a tail of 2 prompts is left out" in out
    assert "fakes:FakeServers" in out
    assert "nothing was started" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["run", "check"])
def test_the_printed_configuration_can_be_checked_in_turn(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert main([command, "quickstart", *STANDINS, "--print-config", "--out", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "# override 'trainer.mode=sync'" in text
    assert not folder.exists()
    printed = tmp_path / "printed.yaml"
    printed.write_text(text)
    assert main(["check", str(printed), "--out", str(tmp_path / "other")]) == 0
    assert main([command, "quickstart", "data.trian=1", "--print-config"]) == 2


def test_check_shows_all_mistakes_one_per_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = ["data.trian_files=x", "reward.limit_s=0", "actor_rollout_ref.rollout.n=1", "runtime_options={cpus: 2}"]
    assert main(["check", "quickstart", *STANDINS, *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for words in ("did you mean data.train_files?", "> 0, got 0", "every advantage would be 0", "runtime_options.cpus"):
        assert sum(words in line for line in lines) == 1


def test_a_run_that_is_refused_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "quickstart", "--out", str(tmp_path / "run"), *STANDINS, "data.seed=x"]) == 2
    assert not (tmp_path / "run").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_data_that_make_no_step_are_refused(capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path) -> None:
    overrides = from_files(prepared, "trainer.total_training_steps=null")
    assert main(["run", "quickstart", "--out", str(tmp_path / "run"), *overrides]) == 2
    assert "1 * 10 // 16 = 0" in capsys.readouterr().err


def test_a_failed_run_shows_the_first_cause_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["run", "quickstart", *STANDINS, "--out", str(out), "prepare=cli_cases:failing"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the run failed: OSError: disk full while writing prepared"
    assert lines[1] == "  led to RuntimeError: no data could be made"
    assert len(lines) <= 30
    assert "RuntimeError: no data could be made" in (out / "error.txt").read_text()
    assert not (out / "summary.json").exists()


def test_an_interrupted_run_exits_with_130(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["run", "quickstart", *STANDINS, "--out", str(out), "prepare=cli_cases:interrupted"]) == 130


def test_a_previous_run_is_kept_unless_told_otherwise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["run", "quickstart", "--out", str(out), *STANDINS, "prepare=cli_cases:failing"]
    assert main(command) == 1
    (out / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    capsys.readouterr()
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "metrics.jsonl").exists()
    assert main([*command, "--overwrite"]) == 1
    assert not (out / "metrics.jsonl").exists()


def test_interrupts_are_remembered_when_an_import_swallows_them() -> None:
    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupts.hand_over()


def test_a_reward_file_that_ends_the_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import sys\nsys.exit(0)\n")
    code = main(["check", "quickstart", *STANDINS, "reward.name=null", f"reward.custom_reward_function.path={file}"])
    assert code == 2
    assert "SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ("trainer.val_only=true", "trainer.rollout_only=true", "trainer.test_freq=5"),
        ("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.top_p=0.5"),
    ],
)
def test_each_mistake_has_a_line_that_begins_alike(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart", *STANDINS, *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("error: ") for line in lines), lines


def test_what_belongs_to_a_mistake_is_indented_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart", *STANDINS, "trainer.logger=[cli_cases:SilentLoop]"]) == 2
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("error: override")
    assert more
    assert all(line.startswith("  - ") for line in more), more


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_folder_is_no_recipe(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder; give a YAML file in it" in capsys.readouterr().err
