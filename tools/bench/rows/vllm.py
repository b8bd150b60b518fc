"""What our manager costs over bare vLLM, what two pinned replicas bring, and what an update in flight takes.

Both sides have the same vLLM with the same arguments on the same cores; it serves one of them at a time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from bench.core import BenchError, Row, Target
from bench.mended import MENDED
from bench.turns import middle, ratios
from bench.vllm_serving import Load, ask, ask_bare, bare, cores, model_of, require_vllm, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from bench.core import Benchmark, Conditions

__all__ = ["BENCHMARKS"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerVersusBare:
    """Tokens per second through client, balancer, Ray and replica, over those of `AsyncLLM.generate`."""

    name: str
    target: Target
    load: Load
    baseline: str | None = "AsyncLLM.generate in one process, all requests at once, whole answers"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate both sides."""
        require_vllm()
        ours, theirs = asyncio.run(self._play(conditions))
        figure, spread = middle(ratios(ours, theirs))
        return (
            Row(
                name=self.name,
                figure=figure,
                spread=spread,
                count=len(ours),
                baseline=self.baseline,
                target=self.target,
                settings=f"{self.load.describe()}; one replica on all cores, Ray",
                leaves_out="starting and weight syncs; that ours also routes, resumes, and tells versions",
            ),
            _speed(f"{self.name}/ours", ours),
            _speed(f"{self.name}/bare", theirs),
        )

    async def _play(self, conditions: Conditions) -> tuple[list[float], list[float]]:
        model, settings = model_of(self.load, conditions)
        async with AsyncExitStack() as stack:
            options = {"cpu_cores": cores()}
            served = await stack.enter_async_context(serving(settings, model, options=options))
            llm = await stack.enter_async_context(bare(settings, options))
            prompts = self.load.prompts(model.config.vocab_size)
            sides: dict[str, Callable[[int], Awaitable[int]]] = {
                "ours": partial(ask, served.client, prompts, self.load.new_tokens),
                "bare": partial(ask_bare, llm, prompts, self.load.new_tokens),
            }
            return await _alternate(sides, self.load, rounds=conditions.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasVersusGenerate:
    """Tokens per second of two replicas, each pinned to a core, over those of transformers on both cores."""

    name: str = "vllm2_vs_generate"
    target: Target = field(default_factory=lambda: Target(limit=2.0))
    load: Load = field(
        default_factory=lambda: Load(model="smollm2", requests=128, prompt_tokens=24, new_tokens=96, width=64)
    )
    baseline: str | None = (
        "transformers' generate in inference mode on all cores, in one batch as wide as both replicas together; "
        + MENDED
    )

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate both sides."""
        require_vllm()
        if len(cores()) < 2:
            raise BenchError("two replicas want two cores")
        ours, theirs = asyncio.run(self._play(conditions))
        figure, spread = middle(ratios(ours, theirs))
        return (
            Row(
                name=self.name,
                figure=figure,
                spread=spread,
                count=len(ours),
                baseline=self.baseline,
                target=self.target,
                settings=f"{self.load.describe()}; two replicas, Ray",
                leaves_out="starting; that generate returns no log-probs and stops when the longest answer ends",
            ),
            _speed(f"{self.name}/ours", ours),
            _speed(f"{self.name}/generate", theirs),
        )

    async def _play(self, conditions: Conditions) -> tuple[list[float], list[float]]:
        import torch

        model, settings = model_of(self.load, conditions)
        torch.set_num_threads(len(cores()))
        async with serving(settings, model, replicas=2) as served:
            prompts = self.load.prompts(model.config.vocab_size)

            async def generate(_: int) -> int:
                with torch.inference_mode():
                    ids = torch.tensor(prompts)
                    model.generate(  # type: ignore[operator]
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=self.load.new_tokens,
                        do_sample=True,
                        temperature=1.0,
                        top_k=0,
                        top_p=1.0,
                        use_cache=True,
                        eos_token_id=None,
                        pad_token_id=0,
                    )
                return len(prompts) * self.load.new_tokens

            sides: dict[str, Callable[[int], Awaitable[int]]] = {
                "ours": partial(ask, served.client, prompts, self.load.new_tokens),
                "generate": generate,
            }
            return await _alternate(sides, self.load, rounds=conditions.pairs)


async def _alternate(
    sides: Mapping[str, Callable[[int], Awaitable[int]]], load: Load, *, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the tokens per second of both sides in each round; the first one warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, side in sides.items():
            begun = time.perf_counter()
            tokens = await side(round_)
            if tokens != load.requests * load.new_tokens:
                raise BenchError(f"{name} made {tokens} tokens of {load.requests * load.new_tokens}")
            speeds[name].append(tokens / (time.perf_counter() - begun))
    first, second = (values[1:] for values in speeds.values())
    return first, second


def _speed(name: str, values: list[float]) -> Row:
    figure, spread = middle(values)
    return Row(name=name, figure=figure, spread=spread, count=len(values), unit="tok/s", leaves_out="see the claim")


BENCHMARKS: tuple[Benchmark, ...] = (
    ManagerVersusBare(
        name="manager_vs_bare_vllm",
        target=Target(limit=0.95),
        load=Load(model="smollm2", requests=256, prompt_tokens=24, new_tokens=32, width=64),
    ),
    ManagerVersusBare(
        name="manager_vs_bare_vllm_tiny",
        target=Target(limit=0.7),
        load=Load(model="toy", requests=256, prompt_tokens=8, new_tokens=16, width=64),
    ),
    ReplicasVersusGenerate(),
)
