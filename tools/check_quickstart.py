"""Checks that a quickstart run learned its task: ``python tools/check_quickstart.py RUN``.

Reads the summary, then asks the exported folder the task in plain transformers, without any of our packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

QUESTIONS = ("1 2 3 4 =", "9 0 0 9 =", "5 5 0 7 =", "8 6 4 2 =")


def complaints(summary: dict[str, float]) -> list[str]:
    """Return what a summary lacks."""
    rules = {
        "val_last ≥ 0.98": summary["val_last"] >= 0.98,
        "reward_first < 0.2": summary["reward_first"] < 0.2,
        "reward_last > 0.9": summary["reward_last"] > 0.9,
        "max_staleness_seen ≤ 2": summary["max_staleness_seen"] <= 2,
        "steps = final_version": summary["steps"] == summary["final_version"],
    }
    return [f"{rule} does not hold: {summary}" for rule, holds in rules.items() if not holds]


def wrong_answers(model_folder: Path) -> list[str]:
    """Return the questions that the exported policy does not answer by copying the digits and ending."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    wrong = []
    for question in QUESTIONS:
        ids: list[int] = tokenizer(question, add_special_tokens=False)["input_ids"]
        start = len(ids)
        while len(ids) < start + 5:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        wanted = [*ids[: start - 1], tokenizer.eos_token_id]
        if ids[start:] != wanted:
            wrong.append(f"{question} {tokenizer.decode(ids[start:])}")
    return wrong


def main(arguments: list[str]) -> int:
    """Print what is wrong; return 1 if anything is."""
    folder = Path(arguments[0])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    wrong = complaints(summary)
    answers = wrong_answers(folder / "model")
    if len(answers) > 1:
        wrong.append(f"the exported policy answers wrongly: {answers}")
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        staleness, seconds = summary["max_staleness_seen"], summary["wall_s"]
        print(f"ok: held-out {summary['val_last']:.3f}, staleness ≤ {staleness}, {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
