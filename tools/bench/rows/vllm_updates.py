"""How long generation stands still for an update in flight, against the calls that vLLM itself offers for it.

Requests are running on both sides and go on over their cache. Ours moves the weights from the trainer's memory, checks
every byte and reports; bare vLLM is told to load them from a folder that the page cache holds, which is the way it has
without a transfer engine.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.core import BenchError, Row, Target
from bench.turns import middle
from bench.vllm_serving import Load, ask, ask_bare, bare, cores, model_of, require_vllm, serving

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from vllm.v1.engine.async_llm import AsyncLLM

    from bench.core import Benchmark, Conditions
    from bench.vllm_serving import Served

__all__ = ["BENCHMARKS"]

LIMIT_S = 120.0
UNDER_WAY_S = 0.15
"""Time after which all requests are being decoded, and none is done."""
PHASES = ("pause", "connect", "transfer", "verify", "commit", "resume")
"""Phases of a sync in which nothing is decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInFlight:
    """Seconds from pause to resume of ours over those of bare vLLM."""

    name: str = "update_in_flight_vs_bare_vllm"
    target: Target = field(default_factory=lambda: Target(limit=1.3, at_least=False))
    load: Load = field(
        default_factory=lambda: Load(model="toy", requests=32, prompt_tokens=8, new_tokens=400, width=32)
    )
    baseline: str | None = "seconds of pause_generation(keep), reload_weights from a folder, resume_generation"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate both sides, several updates in each pair."""
        require_vllm()
        ours, theirs = asyncio.run(self._play(conditions))
        figure, spread = middle([mine / other for mine, other in zip(ours, theirs, strict=True)])
        return (
            Row(
                name=self.name,
                figure=figure,
                spread=spread,
                count=len(ours),
                baseline=self.baseline,
                target=self.target,
                settings=f"{self.load.describe()}; one replica, Ray; less is better",
                leaves_out="what goes before the pause: preparing ours, and writing the folder of the other side",
            ),
            _milliseconds(f"{self.name}/ours", ours),
            _milliseconds(f"{self.name}/bare", theirs),
        )

    async def _play(self, conditions: Conditions) -> tuple[list[float], list[float]]:
        from transformers import PreTrainedModel

        model, settings = model_of(self.load, conditions)
        folder = conditions.folder / "saved"
        if not isinstance(model, PreTrainedModel):
            raise BenchError("the toy is no model of transformers")
        model.save_pretrained(folder)
        prompts = self.load.prompts(model.config.vocab_size)
        found: dict[str, list[float]] = {"ours": [], "bare": []}
        async with AsyncExitStack() as stack:
            options = {"cpu_cores": cores()}
            served = await stack.enter_async_context(serving(settings, model, options=options, pause_mode="keep"))
            llm = await stack.enter_async_context(bare(settings, options))
            tokens = self.load.new_tokens
            for round_ in range(conditions.pairs + 1):
                seconds = await _during(ask(served.client, prompts, tokens, round_), _update(served, round_ + 1))
                other = await _during(ask_bare(llm, prompts, tokens, round_), _reload(llm, str(folder), round_ + 1))
                if round_ > 0:
                    found["ours"].append(seconds)
                    found["bare"].append(other)
        return found["ours"], found["bare"]


async def _during(generate: Coroutine[None, None, int], update: Coroutine[None, None, float]) -> float:
    """Update while requests are running, and return what `update` returns."""
    running = asyncio.create_task(generate)
    await asyncio.sleep(UNDER_WAY_S)
    seconds = await asyncio.wait_for(update, LIMIT_S)
    if running.done():
        raise BenchError("the requests were done before the update was")
    await asyncio.wait_for(running, LIMIT_S)
    return seconds


async def _update(served: Served, version: int) -> float:
    """Return the seconds in which nothing was decoded."""
    from verl_contracts.clock import Deadline, SystemClock

    report = await served.checkpoint.update_weights(version, deadline=Deadline.after(SystemClock(), LIMIT_S))
    return sum(report.seconds[phase] for phase in PHASES)


async def _reload(llm: AsyncLLM, folder: str, version: int) -> float:
    begun = time.perf_counter()
    await llm.pause_generation(mode="keep", clear_cache=False)
    await llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    await llm.update_weight_version(str(version))
    await llm.resume_generation()
    return time.perf_counter() - begun


def _milliseconds(name: str, seconds: list[float]) -> Row:
    figure, spread = middle([1000.0 * value for value in seconds])
    return Row(name=name, figure=figure, spread=spread, count=len(seconds), unit="ms", leaves_out="see the claim")


BENCHMARKS: tuple[Benchmark, ...] = (UpdateInFlight(),)
