"""GSM8K, grade-school word problems, from the files in which it is published: JSONL or parquet, question and answer.

They are not brought along: a folder with ``train`` and ``test`` is named by ``VERL_GSM8K``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["convert", "prepare"]

FOLDER = "VERL_GSM8K"
"""Environment variable that names the folder."""
DEFAULT_FOLDER = "data/gsm8k"
INSTRUCTION = "Let's think step by step, and end with the final number."
MARK = "####"
"""Stands before the number in a published answer."""


def prepare(folder: Path) -> None:
    """Write ``train.jsonl`` and ``val.jsonl`` into `folder`. The model is not made here."""
    source = Path(os.environ.get(FOLDER) or DEFAULT_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    convert(_find(source, "train"), folder / "train.jsonl")
    convert(_find(source, "test"), folder / "val.jsonl")


def convert(source: Path, target: Path) -> None:
    """Write the problems of one file in verl's columns. Raises `DataError` for a row that is none."""
    with target.open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(source), start=1):
            question, answer = row.get("question"), row.get("answer")
            if not isinstance(question, str) or not isinstance(answer, str) or MARK not in answer:
                raise DataError(f"{source}:{number}: must have `question`, and `answer` with {MARK!r}; got {row!r:.80}")
            prompt = {"role": "user", "content": f"{question} {INSTRUCTION}"}
            columns = {
                "prompt": [prompt],
                "data_source": "openai/gsm8k",
                "reward_model": {"ground_truth": answer.rpartition(MARK)[2].strip().replace(",", "")},
                "extra_info": {"index": number - 1, "answer": answer},
            }
            file.write(json.dumps(columns, ensure_ascii=False) + "\n")


def _find(folder: Path, name: str) -> Path:
    """Return the file of one half. The hub's parquet files are called ``train-00000-of-00001.parquet``."""
    for pattern in (f"{name}.jsonl", f"{name}.parquet", f"{name}-*.parquet"):
        for path in sorted(folder.glob(pattern)):
            return path
    raise DataError(f"{folder}: no {name}.jsonl or {name}.parquet of GSM8K; set {FOLDER} to the folder that holds them")


def _rows(source: Path) -> Iterator[dict[str, object]]:
    if source.suffix == ".parquet":
        from pyarrow import parquet  # here, because importing it takes long

        yield from parquet.read_table(source).to_pylist()
        return
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise DataError(f"{source}:{number}: not JSON: {exc}") from exc
        yield row if isinstance(row, dict) else {}
