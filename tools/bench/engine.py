"""Tokens per second of the embedded engine against transformers' `generate`, in alternating pairs in one process.

The baseline is what one would write without an engine: prompts in batches as wide as the engine, in order of arrival,
each batch running until its longest answer is done; in inference mode, with a cache, without padding, without stop
ids, and without the log-probs that the engine returns. Both sides take the same prompts, lengths, weights, dtype and
threads. A row's figure is the median over pairs of the ratio of wall times; CPU seconds stand beside it.

    python tools/bench/engine.py [--only TEXT] [--rounds N] [--threads N] [--model FOLDER] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.rollout import RolloutSettings
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams
from verl_contracts.weights import TensorMeta
from verl_rollout.engine.torch.engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

CLOCK = SystemClock()
LIMIT_S = 600.0
TOY = Qwen2Config(
    vocab_size=12,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
"""The quickstart's model, for longer sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One row of the table."""

    name: str
    width: int
    """Sequences decoded at once, on both sides."""
    prompt: int
    """Tokens of each prompt."""
    lengths: tuple[int, ...]
    """Tokens to generate for each request."""
    siblings: int = 1
    """Requests in a row that share a prompt."""

    def prompts(self, vocab: int) -> list[list[int]]:
        """Return one prompt per request, the same in every run."""
        draw = random.Random(1)
        distinct = [[draw.randrange(vocab) for _ in range(self.prompt)] for _ in self.lengths]
        return [distinct[i // self.siblings] for i in range(len(self.lengths))]


def lognormal(count: int, mean: float, longest: int) -> tuple[int, ...]:
    """Return heavy-tailed lengths, the same in every run."""
    draw = random.Random(0)
    return tuple(max(1, min(longest, round(mean * draw.lognormvariate(-0.5, 1.0)))) for _ in range(count))


TOY_LOADS = (
    Load(name="quickstart's, 16 x 8 of 5", width=128, prompt=5, lengths=(5,) * 128, siblings=8),
    Load(name="64 of 16", width=64, prompt=16, lengths=(16,) * 64),
    Load(name="64 of 64", width=64, prompt=16, lengths=(64,) * 64),
    Load(name="128 lognormal", width=32, prompt=16, lengths=lognormal(128, 24.0, 200)),
)
LANGUAGE_LOADS = (
    Load(name="32 of 24", width=32, prompt=24, lengths=(24,) * 32),
    Load(name="32 lognormal", width=8, prompt=24, lengths=lognormal(32, 20.0, 96)),
)


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Yield a model's parameters as a weight sync would."""
    for name, tensor in model.named_parameters():
        yield TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")), tensor


@asynccontextmanager
async def opened(settings: RolloutSettings, model: PreTrainedModel) -> AsyncIterator[TorchEngine]:
    """Yield an engine that serves `model` as version 1."""
    engine = TorchEngine.create(settings, replica_id="engine", clock=CLOCK)
    try:
        await load(engine, model, 1)
        yield engine
    finally:
        await engine.close()


async def load(engine: TorchEngine, model: PreTrainedModel, version: int) -> None:
    """Make the engine serve `model` as `version`."""
    await engine.pause("abort", deadline=Deadline.after(CLOCK, LIMIT_S))
    engine.begin_update()
    engine.target().load(tensors_of(model))
    await engine.commit(version, keep_cache=False)
    await engine.resume()


async def answer(
    engine: TorchEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, temperature: float = 1.0
) -> list[Completion]:
    """Ask for all at once."""
    answers = await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(
                    request_id=str(i),
                    prompt_ids=tuple(prompt),
                    sampling=SamplingParams(max_tokens=length, temperature=temperature, stop_token_ids=()),
                    key=SampleKey(uid="0-0-0", sample=i, turn=0),
                    resumed_tokens=0,
                    min_version=0,
                ),
                deadline=Deadline.after(CLOCK, LIMIT_S),
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        )
    )
    return [value for value in answers if isinstance(value, Completion)]


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, width: int, sample: bool = True
) -> list[list[int]]:
    """Return what `generate` makes of prompts of one length, in batches of `width`."""
    made: list[list[int]] = []
    with torch.inference_mode():
        for first in range(0, len(prompts), width):
            ids = torch.tensor(prompts[first : first + width], device=model.device)
            output = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(lengths[first : first + width]),
                do_sample=sample,
                top_k=0 if sample else None,
                top_p=1.0 if sample else None,
                temperature=1.0 if sample else None,
                use_cache=True,
                eos_token_id=None,
                pad_token_id=0,
            )
            made.extend(output[:, ids.shape[1] :].tolist())
    return made


def pairs(model: PreTrainedModel, folder: Path, load: Load, *, dtype: str, rounds: int) -> list[dict[str, float]]:
    """Return wall and CPU seconds of both sides for each pair; the first pair warms up and is left out."""
    prompts = load.prompts(model.config.vocab_size)
    settings = RolloutSettings(
        model_path=str(folder),
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        max_num_seqs=load.width,
        max_model_len=load.prompt + max(load.lengths),
    )

    async def play() -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        async with opened(settings, model) as engine:
            for _ in range(rounds + 1):
                marks = [(time.perf_counter(), time.process_time())]
                await answer(engine, prompts, load.lengths)
                marks.append((time.perf_counter(), time.process_time()))
                generate(model, prompts, load.lengths, width=load.width)
                marks.append((time.perf_counter(), time.process_time()))
                (w0, c0), (w1, c1), (w2, c2) = marks
                found.append({"engine": w1 - w0, "engine_cpu": c1 - c0, "generate": w2 - w1, "generate_cpu": c2 - c1})
        return found[1:]

    return asyncio.run(play())


def measure(
    model: PreTrainedModel, folder: Path, load: Load, *, name: str, dtype: str, rounds: int
) -> dict[str, object]:
    """Measure one row and print it."""
    found = pairs(model, folder, load, dtype=dtype, rounds=rounds)
    ratios = [pair["generate"] / pair["engine"] for pair in found]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    middle = {side: statistics.median(pair[side] for pair in found) for side in found[0]}
    rate = sum(load.lengths) / middle["engine"]
    print(
        f"{name:44} {ratio:5.2f} ({low:.2f} … {high:.2f})  CPU {middle['generate_cpu'] / middle['engine_cpu']:5.2f}  "
        f"engine {middle['engine'] * 1e3:8.1f} ms  generate {middle['generate'] * 1e3:8.1f} ms  {rate:8.0f} tok/s",
        flush=True,
    )
    return {"name": f"engine_vs_generate/{name}", "value": round(ratio, 3), "spread": [round(low, 3), round(high, 3)]}


def main() -> int:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--only", default="")
    parser.add_argument("--model", type=Path, help="folder of a language model, for the rows that need one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        TOY.save_pretrained(folder)
        for threads in options.threads or [1]:
            torch.set_num_threads(threads)
            plan: list[tuple[str, Path, str, tuple[Load, ...], int]] = [
                ("toy", Path(folder), "float32", TOY_LOADS, 4 * options.rounds)
            ]
            if options.model:
                plan += [
                    (options.model.name, options.model, dtype, LANGUAGE_LOADS, options.rounds)
                    for dtype in ("bfloat16", "float32")
                ]
            for title, path, dtype, loads, rounds in plan:
                wanted = [
                    (name, load)
                    for load in loads
                    if options.only in (name := f"{title}, {dtype}, {threads} threads, {load.name}")
                ]
                if not wanted:
                    continue
                torch.manual_seed(0)
                if title == "toy":
                    model = AutoModelForCausalLM.from_config(TOY)  # type: ignore[no-untyped-call]
                else:
                    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
                model.requires_grad_(False).train(mode=False)
                rows += [measure(model, path, load, name=name, dtype=dtype, rounds=rounds) for name, load in wanted]
    if options.out:
        report = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
