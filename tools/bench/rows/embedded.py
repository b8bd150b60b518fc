"""The embedded engine's tokens per second against transformers' `generate`, at equal and at heavy-tailed lengths.

Both sides take the same prompts, lengths, weights, type and one thread, in turns in one process.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bench.core import BenchError, Row, Target
from bench.mended import MENDED, mend_head
from bench.turns import middle, ratios

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from bench.core import Benchmark, Conditions
    from verl_contracts.rollout import RolloutSettings
    from verl_contracts.tokens import GenerationRequest
    from verl_rollout.engine.torch.engine import TorchEngine

__all__ = ["BENCHMARKS"]

LIMIT_S = 600.0
LONGEST = 1024
"""Positions that the toy gets room for."""
TOY_ROUNDS_PER_PAIR = 4
GENERATE = (
    "transformers' generate in inference mode, with a cache, sampling, no stop ids, in batches as wide as the engine "
    f"and in order of arrival, each until its longest answer is done; {MENDED}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of both sides."""

    name: str
    """Last part of the row's name; empty for the claim itself."""
    model: Literal["toy", "smollm2"]
    width: int
    """Sequences decoded at once."""
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Tokens to generate, for each request."""
    siblings: int = 1
    """Requests in a row that share a prompt."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the weights, as in the recipes."""
        return "float32" if self.model == "toy" else "bfloat16"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return one prompt for each request, the same in every run."""
        draw = random.Random(1)
        made = [[draw.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in self.lengths]
        return [made[i // self.siblings] for i in range(len(self.lengths))]

    def describe(self) -> str:
        """Return it in words."""
        lengths = f"{min(self.lengths)} to {max(self.lengths)}" if len(set(self.lengths)) > 1 else self.lengths[0]
        return (
            f"{self.model}, {self.dtype}, {len(self.lengths)} requests, {self.width} at once, {self.prompt_tokens} "
            f"tokens in and {lengths} out, 1 thread"
        )


def lognormal(count: int, *, mean: float, longest: int) -> tuple[int, ...]:
    """Return heavy-tailed lengths, the same in every run."""
    draw = random.Random(0)
    return tuple(max(1, min(longest, round(mean * draw.lognormvariate(-0.5, 1.0)))) for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A claim for one kind of lengths; its first load is the claim, the others show where it holds."""

    name: str
    target: Target
    loads: tuple[Load, ...]
    baseline: str | None = GENERATE

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate both sides in this process."""
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return tuple(row for load in self.loads for row in self._rows(load, conditions))
        finally:
            torch.set_num_threads(threads)

    def _rows(self, load: Load, conditions: Conditions) -> tuple[Row, Row]:
        model, folder = _toy(conditions.folder) if load.model == "toy" else _language_model(conditions.smollm2)
        rounds = conditions.pairs * (TOY_ROUNDS_PER_PAIR if load.model == "toy" else 1)
        ours, theirs = asyncio.run(_play(model, folder, load, rounds=rounds))
        name = f"{self.name}/{load.name}" if load.name else self.name
        figure, spread = middle(ratios(ours, theirs))
        claim = Row(
            name=name,
            figure=figure,
            spread=spread,
            count=len(ours),
            baseline=self.baseline,
            target=None if load.name else self.target,
            settings=load.describe(),
            leaves_out="that the engine also returns log-probs, and can stop, abort and resume sequences; tokens that "
            "nobody asked for count for neither side",
        )
        figure, spread = middle(ours)
        speed = Row(
            name=f"{name}/engine", figure=figure, spread=spread, count=len(ours), unit="tok/s", leaves_out="see above"
        )
        return claim, speed


def _toy(folder: Path) -> tuple[PreTrainedModel, Path]:
    """Return the quickstart's model, with room for longer sequences, and its folder."""
    from verl_trainers.recipes import toy

    toy.write_model(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = LONGEST
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return _load(folder, "float32"), folder


def _language_model(folder: Path) -> tuple[PreTrainedModel, Path]:
    if not folder.exists():
        raise BenchError(f"{folder} is not there; make it: python tools/make_smollm2.py models/smollm2")
    return _load(folder, "bfloat16"), folder


def _load(folder: Path, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if not isinstance(model, PreTrainedModel):
        raise BenchError(f"{folder} holds a {type(model).__name__}, which is no model of transformers")
    model.requires_grad_(False).train(mode=False)
    mend_head(model)
    return model


async def _play(model: PreTrainedModel, folder: Path, load: Load, *, rounds: int) -> tuple[list[float], list[float]]:
    """Return the tokens per second of both sides in each round; the first one warms up."""
    from verl_contracts.rollout import RolloutSettings

    prompts = load.prompts(model.config.vocab_size)
    settings = RolloutSettings(
        model_path=str(folder),
        dtype=load.dtype,
        max_num_seqs=load.width,
        max_model_len=load.prompt_tokens + max(load.lengths),
    )
    tokens = sum(load.lengths)
    ours: list[float] = []
    theirs: list[float] = []
    async with _serving(settings, model) as engine:
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            await _ask(engine, load, prompts)
            ours.append(tokens / (time.perf_counter() - begun))
            theirs.append(tokens / _seconds(lambda: _generate(model, load, prompts)))
    return ours[1:], theirs[1:]


@asynccontextmanager
async def _serving(settings: RolloutSettings, model: PreTrainedModel) -> AsyncIterator[TorchEngine]:
    """Yield an engine that serves the weights of `model`."""
    from verl_contracts.clock import Deadline, SystemClock
    from verl_contracts.weights import TensorMeta
    from verl_rollout.engine.torch.engine import TorchEngine

    clock = SystemClock()
    engine = TorchEngine.create(settings, replica_id="bench", rank=0, clock=clock)
    try:
        await engine.pause("abort", deadline=Deadline.after(clock, LIMIT_S))
        engine.begin_update()
        engine.target().load(
            (TensorMeta(name=name, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch.")), value)
            for name, value in model.named_parameters()
        )
        await engine.commit(1, keep_cache=False)
        await engine.resume()
        yield engine
    finally:
        await engine.close()


async def _ask(engine: TorchEngine, load: Load, prompts: list[list[int]]) -> None:
    """Ask for all at once, and check that every token came."""
    from verl_contracts.clock import Deadline, SystemClock

    deadline = Deadline.after(SystemClock(), LIMIT_S)
    requests = [
        _request(i, prompt, length) for i, (prompt, length) in enumerate(zip(prompts, load.lengths, strict=True))
    ]
    answers = await asyncio.gather(*(engine.generate(request, deadline=deadline) for request in requests))
    got = tuple(len(answer.token_ids) for answer in answers)
    if got != load.lengths:
        raise BenchError(f"the engine was asked for {load.lengths} tokens and made {got}")


def _request(index: int, prompt: list[int], length: int) -> GenerationRequest:
    from verl_contracts.tokens import GenerationRequest, SampleKey, SamplingParams

    return GenerationRequest(
        request_id=str(index),
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=length),
        key=SampleKey(uid="0-0-0", sample=index, turn=0),
    )


def _generate(model: PreTrainedModel, load: Load, prompts: list[list[int]]) -> None:
    """Do the same with `generate`."""
    import torch

    with torch.inference_mode():
        for first in range(0, len(prompts), load.width):
            ids = torch.tensor(prompts[first : first + load.width])
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(load.lengths[first : first + load.width]),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                use_cache=True,
                eos_token_id=None,
                pad_token_id=0,
            )


def _seconds(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


BENCHMARKS: tuple[Benchmark, ...] = (
    Embedded(
        name="embedded_vs_generate_equal",
        target=Target(limit=0.95),
        loads=(
            Load(name="", model="toy", width=64, prompt_tokens=16, lengths=(64,) * 64),
            Load(name="quickstart", model="toy", width=128, prompt_tokens=5, lengths=(5,) * 128, siblings=8),
            Load(name="smollm2", model="smollm2", width=32, prompt_tokens=24, lengths=(24,) * 32),
        ),
    ),
    Embedded(
        name="embedded_vs_generate_lognormal",
        target=Target(limit=1.3),
        loads=(
            Load(name="", model="toy", width=32, prompt_tokens=16, lengths=lognormal(128, mean=24.0, longest=200)),
            Load(
                name="smollm2", model="smollm2", width=8, prompt_tokens=24, lengths=lognormal(32, mean=20.0, longest=96)
            ),
        ),
    ),
)
