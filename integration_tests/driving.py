"""Runs `verl-train` as a person would, in a process of its own, under a hard limit, and reads the run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.val_before_train=false",
    "data.val_files=[]",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
)
"""Overrides that make a quickstart run small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that ended."""

    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> Mapping[str, object]:
        data: Mapping[str, object] = json.loads((self.folder / "summary.json").read_text())
        return data

    def events(self, name: str) -> list[Mapping[str, object]]:
        """The fields of each event of one name, in order."""
        rows = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [row for row in rows if row["name"] == name]


def environment() -> dict[str, str]:
    """This process's environment, with the outside plug-ins importable and one thread for torch."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "outside"), env.get("PYTHONPATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    return env


def command(out: Path, *overrides: str) -> list[str]:
    """The command line of a small quickstart run."""
    return [sys.executable, "-m", "verl_trainers.cli", "run", "quickstart", "--out", str(out), *SMALL, *overrides]


def train(out: Path, *overrides: str, limit_s: float = 120.0) -> Finished:
    """Run to the end. A run that outlasts the limit is killed with its children, and fails the test."""
    process = subprocess.Popen(
        command(out, *overrides),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=10)
        raise AssertionError(f"the run did not end within {limit_s} s:\n{output[-4000:]}") from None
    return Finished(code=process.returncode, output=output, folder=out)


def answer(model_folder: Path, prompt: str, *, tokens: int = 5) -> list[str]:
    """Greedy continuation of `prompt` by the exported policy, in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return [str(tokenizer.decode([token])) for token in ids[start:]]
