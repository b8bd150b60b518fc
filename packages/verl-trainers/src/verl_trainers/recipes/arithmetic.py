"""Sums up to 20 + 20, asked as a chat: a task that a small instruction-tuned model half knows."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["prepare"]

SEED = 0
LARGEST = 20
HELD_OUT = 64


def prepare(folder: Path) -> None:
    """Write ``train.jsonl`` and ``val.jsonl`` into `folder`. The model is not made here."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(SEED).shuffle(sums)
    write_rows(folder / "val.jsonl", sums[:HELD_OUT])
    write_rows(folder / "train.jsonl", sums[HELD_OUT:])


def write_rows(path: Path, sums: Sequence[tuple[int, int]]) -> None:
    """Write one row for each sum, in verl's columns."""
    with path.open("w", encoding="utf-8") as file:
        for a, b in sums:
            row = {
                "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
                "data_source": "arithmetic",
                "reward_model": {"ground_truth": str(a + b)},
                "extra_info": {"a": a, "b": b},
            }
            file.write(json.dumps(row) + "\n")
