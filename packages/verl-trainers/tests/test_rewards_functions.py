"""Reward functions: the shipped ones, and functions in verl's form, used unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from config_cases import GOOD

from verl_contracts.errors import ConfigError
from verl_contracts.rewards import RewardRequest
from verl_contracts.testing.suites.rewards import RewardFunctionSuite
from verl_trainers.config.load import load_config
from verl_trainers.rewards.builtin import CopyReward, LastNumber
from verl_trainers.rewards.client import reward_spec
from verl_trainers.rewards.verl_function import VerlFunction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.events import JsonValue
    from verl_contracts.rewards import RewardFunction


def request(truth: JsonValue, *, truncated: bool = False) -> RewardRequest:
    return RewardRequest(
        uid="0-0-0",
        sample=0,
        data_source="t",
        response_ids=(1,),
        ground_truth=truth,
        extra_info={"index": 5},
        truncated=truncated,
    )


class TestCopyReward(RewardFunctionSuite):
    def function(self) -> RewardFunction:
        return CopyReward()

    def cases(self) -> Sequence[tuple[RewardRequest, str, float]]:
        truth = request("1 2 3 4")
        return [
            (truth, "1 2 3 4", 1.0),
            (request("1 2 3 4", truncated=True), "1 2 3 4", 0.8),
            (truth, "1 2 3 4 4", 0.8),
            (truth, "1 9 3", 0.4),
            (truth, "", 0.0),
            (truth, "9 9 9 9", 0.2),
        ]


class TestLastNumber(RewardFunctionSuite):
    def function(self) -> RewardFunction:
        return LastNumber()

    def cases(self) -> Sequence[tuple[RewardRequest, str, float]]:
        return [
            (request("1234"), "3 + 4 = 1,234.", 1.0),
            (request(-7), "it is -7", 1.0),
            (request("7"), "7, or rather 8", 0.0),
            (request("2.5"), "2.50", 1.0),
            (request("7"), "seven", 0.0),
        ]


@pytest.mark.parametrize(("function", "truth"), [(CopyReward(), None), (CopyReward(), ""), (LastNumber(), "seven")])
def test_a_row_without_usable_truth_is_a_failure_and_no_score(function: RewardFunction, truth: JsonValue) -> None:
    with pytest.raises(ValueError, match=r"ground_truth|could not convert"):
        function.score(request(truth), "1")


def write(folder: Path, body: str) -> Path:
    file = folder / "my_reward.py"
    file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n{body}\n")
    return file


@pytest.mark.parametrize(
    ("body", "score", "metrics"),
    [
        ("    return 1", 1.0, {}),
        ("    return True", 1.0, {}),
        ("    return 0.25, 'reason'", 0.25, {}),
        ("    return {'score': 0.5, 'acc': True, 'pred': 'x'}", 0.5, {"acc": 1.0}),
        ("    import numpy as np\n    return {'score': np.float32(0.5), 'n': np.int64(3)}", 0.5, {"n": 3.0}),
        ("    return float(data_source == 't' and extra_info['index'] == 5 and ground_truth['a'] == [1])", 1.0, {}),
        ("    return len(solution_str) + kwargs['bonus']", 7.0, {}),
    ],
)
def test_every_form_of_result_is_read(tmp_path: Path, body: str, score: float, metrics: dict[str, float]) -> None:
    function = VerlFunction(path=str(write(tmp_path, body)), bonus=3)
    result = function.score(request({"a": [1]}), "text")
    assert (result.outcome, result.score, dict(result.metrics)) == ("scored", score, metrics)


def test_an_async_function_is_awaited(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text(
        "import asyncio\nfrom dataclasses import dataclass\n@dataclass\nclass Verdict:\n    score: float = 1.0\n"
        "async def judge(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0)\n    return Verdict().score\n"
    )
    assert VerlFunction(path=str(file), name="judge").score(request("1"), "1").score == 1.0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    return None", "must return a number"),
        ("    return 'right'", "must return a number"),
        ("    return {'acc': 1}", "without 'score'"),
        ("    return []", "must return a number"),
        ("    return float('inf')", "finite"),
    ],
)
def test_a_result_in_no_known_form_is_an_error(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        VerlFunction(path=str(write(tmp_path, body))).score(request("1"), "1")


def test_a_function_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    file = write(tmp_path, "    return 1")
    with pytest.raises(ConfigError, match=r"no function 'score' in .*; functions there: compute_score"):
        VerlFunction(path=str(file), name="score")
    with pytest.raises(ConfigError, match="no such file"):
        VerlFunction(path=str(tmp_path / "nowhere.py"))


@pytest.mark.parametrize("parameters", ["solution_str, ground_truth", "a, b, c, d", "*texts"])
def test_a_function_that_cannot_be_called_as_it_will_be_is_refused(tmp_path: Path, parameters: str) -> None:
    file = tmp_path / "r.py"
    file.write_text(f"def compute_score({parameters}):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"custom_reward_function\.name: .*write def compute_score\(data_source"):
        VerlFunction(path=str(file))


def test_options_that_a_function_does_not_take_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    VerlFunction(path=str(file))
    with pytest.raises(ConfigError, match=r"'bonus'.*see reward\.options"):
        VerlFunction(path=str(file), bonus=1)


def test_a_configuration_says_how_to_build_the_client() -> None:
    spec = reward_spec(load_config(None, [*GOOD, "reward.limit_s=2", "reward.num_processes=3"]))
    assert spec is not None
    assert spec.path == "verl_trainers.rewards.client:ProcessRewardClient"
    assert dict(spec.arguments) == {
        "function": "copy",
        "options": {},
        "key": "reward.name",
        "tokenizer_path": "model",
        "limit_s": 2.0,
        "num_processes": 3,
        "trust_remote_code": False,
        "start_limit_s": 60.0,
    }
    own = load_config(
        None, [*GOOD, "reward.name=null", "reward.custom_reward_function.path=r.py", "reward.options={k: 1}"]
    )
    spec = reward_spec(own)
    assert spec is not None
    assert spec.arguments["options"] == {"path": "r.py", "name": "compute_score", "k": 1}
    assert reward_spec(load_config(None, [*GOOD, "reward.name=null"])) is None
