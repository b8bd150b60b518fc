"""Throughput of the embedded engine against transformers' `generate`: `python bench_engine.py [rounds]`, by hand.

The baseline is what one would write without an engine: prompts in batches as wide as the engine, in order of arrival,
each batch running until its longest answer is done. Both sides take the same prompts, lengths, weights, dtype and one
thread, in turns; CPU time of the process is compared, since a shared machine makes wall time meaningless.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from engine_models import build, opened, request_of, settings_of, soon
from transformers import Qwen2Config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from verl_rollout.engine.torch.engine import TorchEngine

TOY = Qwen2Config(
    vocab_size=16,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    tie_word_embeddings=True,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
SMALL = Qwen2Config(
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=6,
    tie_word_embeddings=True,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)


def _lognormal(count: int, mean: float, longest: int) -> list[int]:
    draw = random.Random(0)
    return [max(1, min(longest, round(mean * draw.lognormvariate(-0.5, 1.0)))) for _ in range(count)]


async def _engine(engine: TorchEngine, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    await asyncio.gather(
        *(
            engine.generate(request_of(p, max_tokens=n, name=str(i), sample=i), deadline=soon(600))
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        )
    )


def _baseline(model: PreTrainedModel, prompts: Sequence[list[int]], lengths: Sequence[int], width: int) -> None:
    for first in range(0, len(prompts), width):
        ids = torch.tensor(prompts[first : first + width])
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths[first : first + width]),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )


def _cpu_seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _row(
    name: str, config: Qwen2Config, *, width: int, prompt: int, lengths: list[int], rounds: int, distinct: int
) -> None:
    draw = random.Random(1)
    different = [[draw.randrange(16) for _ in range(prompt)] for _ in range(distinct)]
    prompts = [different[i * distinct // len(lengths)] for i in range(len(lengths))]
    model = build(config, spread=1.0)

    async def play(folder: Path) -> tuple[list[float], list[float]]:
        ours: list[float] = []
        theirs: list[float] = []
        settings = settings_of(folder, max_num_seqs=width, max_model_len=prompt + max(lengths))
        async with opened(settings, model) as engine:
            for _ in range(rounds + 1):
                begin = time.process_time()
                await _engine(engine, prompts, lengths)
                ours.append(time.process_time() - begin)
                theirs.append(_cpu_seconds(lambda: _baseline(model, prompts, lengths, width)))
        return ours[1:], theirs[1:]

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        ours, theirs = asyncio.run(play(Path(folder)))
    mine, other = statistics.median(ours), statistics.median(theirs)
    sys.stdout.write(
        f"{name:32} engine {mine * 1e3:8.1f} ms  generate {other * 1e3:8.1f} ms  ratio {other / mine:5.2f}  "
        f"{sum(lengths) / mine:8.0f} tok/s\n"
    )


def main() -> None:
    """Print one row per load."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    _row("toy, 16 x 8 of 6 tokens", TOY, width=128, prompt=5, lengths=[6] * 128, rounds=rounds * 4, distinct=16)
    _row("toy, 64 of 64, all distinct", TOY, width=64, prompt=16, lengths=[64] * 64, rounds=rounds, distinct=64)
    _row("small, 32 of 48, all distinct", SMALL, width=32, prompt=16, lengths=[48] * 32, rounds=rounds, distinct=32)
    skewed = _lognormal(128, 24.0, 200)
    _row("toy, 128 lognormal", TOY, width=32, prompt=16, lengths=skewed, rounds=rounds, distinct=128)
    _row("small, 64 lognormal", SMALL, width=16, prompt=16, lengths=skewed[:64], rounds=rounds, distinct=64)


if __name__ == "__main__":
    main()
