"""Tasks of the library `reasoning_gym`: data that are made here, and a reward that asks the library.

The library is imported where it is used, so that everything else works without it.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
from typing import TYPE_CHECKING, Protocol, cast

from verl_contracts.errors import ConfigError
from verl_contracts.rewards import RewardResult
from verl_contracts.samples import SCORED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from verl_contracts.rewards import RewardFunction, RewardRequest

__all__ = ["ReasoningReward", "prepare", "write_rows"]

TASK = "VERL_REASONING_TASK"
"""Environment variable that names the task."""
DEFAULT_TASK = "chain_sum"
EASY: Mapping[str, Mapping[str, int]] = {
    DEFAULT_TASK: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
"""Options that suit a small model; other tasks are made with the library's own."""
TRAIN, HELD_OUT = 2048, 64
ANSWER = ("<answer>", "</answer>")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class ReasoningGym(Protocol):
    """What is used of the library."""

    def create_dataset(self, name: str, **options: int) -> Iterable[Mapping[str, object]]:
        """Return questions with answers and whatever judging them needs."""
        ...

    def get_score_answer_fn(self, name: str) -> Callable[[str, Mapping[str, object]], float]:
        """Return what judges an answer to a question of one task."""
        ...


def prepare(folder: Path) -> None:
    """Write ``train.jsonl`` and ``val.jsonl`` of the task in ``VERL_REASONING_TASK``. The model is not made here."""
    task = os.environ.get(TASK) or DEFAULT_TASK
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", task, size=TRAIN, seed=0)
    write_rows(folder / "val.jsonl", task, size=HELD_OUT, seed=1)


def write_rows(path: Path, task: str, *, size: int, seed: int) -> None:
    """Write `size` questions of `task`, in verl's columns. Raises `ConfigError` for a task that there is not."""
    library = _library()
    known = list(importlib.import_module("reasoning_gym.factory").DATASETS)
    if task not in known:
        near = difflib.get_close_matches(task, known, n=3)
        raise ConfigError(f"{TASK}: no task {task!r} in reasoning_gym; nearest: {', '.join(near) or 'none'}")
    with path.open("w", encoding="utf-8") as file:
        for entry in library.create_dataset(task, size=size, seed=seed, **EASY.get(task, {})):
            row = {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "data_source": task,
                "reward_model": {"ground_truth": entry["answer"]},
                "extra_info": {"entry": entry},
            }
            file.write(json.dumps(row, default=str) + "\n")


class ReasoningReward:
    """The library's own score, between 0 and 1, of what the response gives as its answer."""

    def __init__(self) -> None:
        """Import the library. Raises `ConfigError` that says what to install when it is missing."""
        self._library = _library()
        self._judges: dict[str, Callable[[str, Mapping[str, object]], float]] = {}

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        """Judge what stands between the last ``<answer>`` tags; without any, the last number or all of the response.

        The last number counts where the right answer is one. Raises ValueError for a row not made by `write_rows`.
        """
        entry = request.extra_info.get("entry")
        if not isinstance(entry, dict):
            raise ValueError("the row has no extra_info.entry; make the data with verl_trainers.recipes.reasoning")
        judge = self._judges.get(request.data_source)
        if judge is None:
            judge = self._judges[request.data_source] = self._library.get_score_answer_fn(request.data_source)
        numeric = _NUMBER.fullmatch(str(entry.get("answer"))) is not None
        score = float(judge(_answer(response, numeric=numeric), entry))
        return RewardResult(outcome=SCORED, score=score, metrics={"exact": float(score == 1.0)})


def _answer(response: str, *, numeric: bool) -> str:
    begin, end = ANSWER
    _, tag, tail = response.rpartition(begin)
    if tag:
        return tail.partition(end)[0].strip()
    numbers = _NUMBER.findall(response) if numeric else []
    return numbers[-1] if numbers else response.strip()


def _library() -> ReasoningGym:
    try:
        return cast("ReasoningGym", importlib.import_module("reasoning_gym"))
    except ImportError as exc:
        raise ConfigError(
            f"reasoning_gym cannot be imported: {exc}; run: pip install 'verl-trainers[reasoning]'"
        ) from exc


if TYPE_CHECKING:

    def _is_reward(x: ReasoningReward) -> RewardFunction:
        return x
