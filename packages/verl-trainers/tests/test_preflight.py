"""The report before a run: what it says when all is well, its colors, and that it is quick and starts nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import STANDINS
from model_folders import TINY, write_model_folder

from verl_contracts.errors import ConfigError
from verl_trainers.config.load import resolve_config
from verl_trainers.config.mistakes import Mistake
from verl_trainers.preflight import Report, preflight, preflight_file, wants_color


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("settings", "terminal", "color"),
    [({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_colors_are_for_terminals_whose_user_wants_them(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], terminal: bool, color: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert wants_color(Terminal() if terminal else io.StringIO()) == color


def test_each_mistake_is_said_once_and_warnings_follow() -> None:
    one = Mistake(key="data.seed", place="a.yaml:3", text="is wrong")
    report = Report(mistakes=(one, one, Mistake(key="", text="other")), warnings=("careful",), lines=("fact",))
    assert report.problems() == ["error: a.yaml:3: data.seed: is wrong", "error: other", "warning: careful"]
    assert report.facts() == ["fact"]
    assert report.exit_code == 2
    colored = report.problems(color=True)
    assert colored[0] == "\033[31merror:\033[0m a.yaml:3: \033[1mdata.seed\033[0m: is wrong"
    with pytest.raises(ConfigError, match=r"a\.yaml:3: data\.seed: is wrong\nother"):
        report.require()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("right")
    write_model_folder(folder / "model", TINY)
    (folder / "train.jsonl").write_text(
        '{"prompt": "a b", "reward_model": {"ground_truth": "b"}}\n' * 20 + '{"prompt": "a b c d e f g a b"}\n'
    )
    return [
        *STANDINS,
        f"data.train_files=[{folder}/train.jsonl]",
        f"actor_rollout_ref.model.path={folder}/model",
        "reward.name=copy",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "data.filter_overlong_prompts=true",
    ]


def test_what_is_right_is_described(right: list[str]) -> None:
    report = preflight_file(None, right)
    assert (report.problems(), report.exit_code) == ([], 0)
    text = "\n".join(report.facts())
    for words in (
        "20 prompts of 2 to 2 tokens, median 2 (data.max_prompt_length=8); 1 longer ones are left out",
        "1 full steps: trainer.total_epochs * rows // data.train_batch_size = 1 * 20 // 16 = 1",
        "wanted 1 to train + 0 for replicas = 1 CPU",
        "1 x policy worker: weights ",
        "everything fits; nothing was started",
    ):
        assert words in text
    assert preflight(resolve_config(None, right)).facts() == report.facts()


def test_rows_without_a_ground_truth_are_counted(right: list[str], tmp_path: Path) -> None:
    bare, told = '{"prompt": "a b"}\n', '{"prompt": "a", "reward_model": {"ground_truth": 0}}\n'
    (tmp_path / "none.jsonl").write_text(bare * 16)
    (tmp_path / "some.jsonl").write_text(bare * 3 + told * 13)
    (tmp_path / "reward.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    mine = f"reward.custom_reward_function={{path: {tmp_path}/reward.py, name: judge}}"
    files = [f"data.train_files=[{tmp_path}/none.jsonl]", f"data.val_files=[{tmp_path}/some.jsonl]"]
    report = preflight_file(None, [*right, "reward.name=null", mine, *files])
    first, second = report.problems()
    assert first.startswith(
        "warning: data.train_files: 16 of 16 rows have no reward_model.ground_truth, so judge gets None"
    )
    assert second.startswith("warning: data.val_files: 3 of 16 rows have no")
    (named,) = preflight_file(None, [*right, files[0]]).problems()
    assert "so the reward 'copy' gets None" in named
    assert report.exit_code == 0


def test_what_prepare_makes_is_checked_when_it_is_there(right: list[str], tmp_path: Path) -> None:
    own = ["prepare=cli_cases:failing", f"data.train_files=[{tmp_path}/prepared/train.jsonl]"]
    report = preflight_file(None, [*right, *own], run_dir=str(tmp_path))
    assert report.problems() == []
    assert "made at the start by cli_cases:failing" in "\n".join(report.facts())
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared/train.jsonl").write_text("{\n")
    resolved = resolve_config(None, [*right, *own], run_dir=str(tmp_path))
    assert "1 malformed rows of 1" in preflight(resolved).problems()[0]


@pytest.mark.parametrize(("wanted", "level"), [(None, "WARNING"), ("info", "INFO")])
def test_what_transformers_prints_stays_what_its_user_asked_for(tmp_path: Path, wanted: str | None, level: str) -> None:
    write_model_folder(tmp_path / "model", TINY)
    code = (
        "import logging, sys\nlogging.basicConfig(level=logging.INFO)\n"
        "from verl_trainers.preflight.model import read_model\nread_model(sys.argv[1])\n"
        "print(logging.getLevelName(logging.getLogger('transformers').getEffectiveLevel()))"
    )
    own = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=own if wanted is None else own | {"TRANSFORMERS_VERBOSITY": wanted},
    )
    assert done.stdout.split() == [level]


def test_it_takes_less_than_two_seconds_beyond_the_libraries(right: list[str]) -> None:
    code = (
        "import sys, time\nimport torch\nimport transformers.models.qwen2.modeling_qwen2, transformers.generation\n"
        "began = time.process_time()\n"
        "from verl_trainers.preflight import preflight_file\nreport = preflight_file(None, sys.argv[1:])\n"
        "print(time.process_time() - began, report.exit_code)"
    )
    path = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}", *right],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    seconds, exit_code = done.stdout.split()
    assert exit_code == "0"
    assert float(seconds) < 2
