"""What the recipes make their data from: published files of GSM8K, and the library reasoning_gym."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from verl_contracts.errors import ConfigError, DataError
from verl_contracts.rewards import RewardRequest
from verl_trainers.data.rows import read_rows
from verl_trainers.recipes import gsm8k, reasoning
from verl_trainers.rewards.builtin import LastNumber

PROBLEMS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7 pens.\n#### 7"},
    {"question": "A house costs 1000 dollars, two cost?", "answer": "2 * 1000 = 2000\n#### 2,000"},
]


def request(data_source: str, ground_truth: object, extra_info: dict[str, object], response: str) -> RewardRequest:
    return RewardRequest(
        uid="0-0-0",
        sample=0,
        data_source=data_source,
        ground_truth=json.loads(json.dumps(ground_truth)),
        extra_info=json.loads(json.dumps(extra_info)),
        response_ids=(2,),
        truncated=False,
    )


@pytest.mark.parametrize("name", ["{}.jsonl", "{}.parquet", "{}-00000-of-00001.parquet"])
def test_gsm8k_is_read_as_it_is_published(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for half in ("train", "test"):
        path = tmp_path / name.format(half)
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
        else:
            parquet.write_table(pa.Table.from_pylist(PROBLEMS), path)
    monkeypatch.setenv("VERL_GSM8K", str(tmp_path))
    gsm8k.prepare(tmp_path / "prepared")
    rows = read_rows([str(tmp_path / "prepared" / "train.jsonl")], prompt_key="prompt")
    assert [row.ground_truth for row in rows] == ["7", "2000"]
    assert not isinstance(rows[0].prompt, str)
    assert rows[0].prompt[0].content.startswith("Ann has 3 pens and buys 4. How many? ")
    assert (tmp_path / "prepared" / "val.jsonl").exists()
    verdicts = [
        LastNumber().score(request("openai/gsm8k", row.ground_truth, {}, answer), answer)
        for row, answer in zip(rows, ("so 7 pens", "that is $2,000."), strict=True)
    ]
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0]


def test_gsm8k_that_is_not_there_or_is_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_GSM8K", str(tmp_path))
    with pytest.raises(DataError, match="set VERL_GSM8K to the folder"):
        gsm8k.prepare(tmp_path / "prepared")
    for text, words in (
        ('{"question": "?", "answer": "7"}', "train.jsonl:1: must have"),
        ("{", "train.jsonl:1: not JSON"),
    ):
        (tmp_path / "train.jsonl").write_text(text)
        with pytest.raises(DataError) as error:
            gsm8k.prepare(tmp_path / "prepared")
        assert words in str(error.value)


def test_reasoning_makes_questions_that_its_reward_can_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_REASONING_TASK", raising=False)
    reasoning.prepare(tmp_path)
    train, val = (read_rows([str(tmp_path / f"{name}.jsonl")], prompt_key="prompt") for name in ("train", "val"))
    assert (len(train), len(val)) == (reasoning.TRAIN, reasoning.HELD_OUT)
    reward = reasoning.ReasoningReward()
    for row in train[:20]:
        truth = str(row.ground_truth)
        for response, right in (
            (truth, True),
            (f"<answer> {truth} </answer>, not 77", True),
            (f"It must be 77, no, {truth}, I think.", True),
            (f"{truth}0 or {truth}1", False),
            ("no idea", False),
            ("", False),
        ):
            verdict = reward.score(request(row.data_source, truth, dict(row.extra_info), response), response)
            assert (verdict.score == 1.0, verdict.metrics["exact"] == 1.0) == (right, right), response


def test_an_answer_in_words_is_judged_as_a_whole(tmp_path: Path) -> None:
    reasoning.write_rows(tmp_path / "spell.jsonl", "spell_backward", size=1, seed=0)
    (row,) = read_rows([str(tmp_path / "spell.jsonl")], prompt_key="prompt")
    truth, reward = str(row.ground_truth), reasoning.ReasoningReward()
    asked = request(row.data_source, truth, dict(row.extra_info), truth)
    assert reward.score(asked, f" {truth}\n").score == 1.0
    assert reward.score(asked, f"{truth} 4").score != 1.0


def test_reasoning_has_other_tasks_and_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning.write_rows(tmp_path / "gcd.jsonl", "gcd", size=3, seed=0)
    (row, *_) = read_rows([str(tmp_path / "gcd.jsonl")], prompt_key="prompt")
    asked = request("gcd", row.ground_truth, dict(row.extra_info), str(row.ground_truth))
    assert reasoning.ReasoningReward().score(asked, str(row.ground_truth)).score == 1.0
    monkeypatch.setenv("VERL_REASONING_TASK", "chain_sums")
    with pytest.raises(ConfigError, match="no task 'chain_sums' in reasoning_gym; nearest: chain_sum"):
        reasoning.prepare(tmp_path / "prepared")


def test_a_row_of_other_data_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match=r"extra_info\.entry"):
        reasoning.ReasoningReward().score(request("gcd", "1", {}, "1"), "1")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for use in (reasoning.ReasoningReward, lambda: reasoning.prepare(tmp_path)):
        with pytest.raises(ConfigError, match=r"pip install 'verl-trainers\[reasoning\]'"):
            use()
