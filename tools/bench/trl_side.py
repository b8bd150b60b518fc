"""The baseline of the trainer rows: TRL's `GRPOTrainer` on the same work, as a script that prints its speed.

    python -m bench.trl_side '{…fields of Work…, "threads": 2, "micro_batch": 64}'

TRL gets what is best for it and changes nothing of the work: one process, no logging, saving, tracking, evaluation or
gradient checkpointing, no reference model (beta 0), the whole batch generated at once and trained in micro-batches of
`micro_batch` rows. Generation is what it does by itself on a CPU, transformers' `generate`, mended as `mended` says.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bench.mended import mend_head
from bench.work import Work
from verl_contracts.rewards import RewardRequest
from verl_trainers.rewards.decode import load_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from verl_contracts.rewards import RewardFunction


class Judge:
    """A `RewardFunction` of ours in the form that TRL calls."""

    __name__ = "reward"

    def __init__(self, function: RewardFunction, decode: Callable[[Sequence[int]], str], eos: int) -> None:
        self._function = function
        self._decode = decode
        self._eos = eos
        self.scores: list[float] = []
        self.tokens: list[int] = []

    def __call__(
        self, *, completion_ids: list[list[int]], reward_model: list[dict[str, str]], **_: object
    ) -> list[float]:
        """Judge a batch."""
        scores = []
        for ids, truth in zip(completion_ids, reward_model, strict=True):
            request = RewardRequest(
                uid="0",
                sample=0,
                data_source="bench",
                response_ids=tuple(ids),
                ground_truth=truth["ground_truth"],
                truncated=ids[-1] != self._eos,
            )
            scores.append(self._function.score(request, self._decode(ids)).score or 0.0)
        self.scores += scores
        self.tokens += [len(ids) for ids in completion_ids]
        return scores


def train(work: Work, *, threads: int, micro_batch: int) -> dict[str, float]:
    """Train, and return samples per second after warming up, with what shows that the work was the same."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    disable_progress_bars()

    ends: list[float] = []

    class Stamp(TrainerCallback):
        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
        ) -> None:
            ends.append(time.perf_counter())

    rows = [json.loads(line) for line in Path(work.train_file).read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    module, _, name = work.reward.partition(":")
    function = cast("RewardFunction", getattr(importlib.import_module(module), name)())
    judge = Judge(function, load_decoder(work.model), tokenizer.eos_token_id)
    batch = work.groups * work.n
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,  # the weights are of `dtype` already; autocast would only add casts
            model_init_kwargs={"dtype": work.dtype},
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            steps_per_generation=batch // micro_batch,
            num_generations=work.n,
            max_completion_length=work.max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            num_iterations=1,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=work.clip_high,
            entropy_coef=work.entropy,
            scale_rewards=work.scale_rewards,
            loss_type="dapo",
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=work.steps,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=judge,
            args=config,
            train_dataset=Dataset.from_list([{key: row[key] for key in ("prompt", "reward_model")} for row in rows]),
            processing_class=tokenizer,
            callbacks=[Stamp()],
        )
        mend_head(trainer.model)
        trainer.train()
    if len(judge.scores) != work.steps * batch:
        raise RuntimeError(f"{work.steps} steps of {batch} samples were asked for, {len(judge.scores)} were judged")
    return {
        "samples_per_s": work.counted / (ends[-1] - ends[work.warm_up - 1]),
        "response_tokens": sum(judge.tokens[-work.counted :]) / work.counted,
        "reward": sum(judge.scores[-work.counted :]) / work.counted,
    }


if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    threads, micro_batch = question.pop("threads"), question.pop("micro_batch")
    print(json.dumps(train(Work(**question), threads=threads, micro_batch=micro_batch)))
