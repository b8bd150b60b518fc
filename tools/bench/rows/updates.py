"""What a weight sync costs those who generate: until the first token of the new weights, and while it goes round."""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bench.core import BenchError, Row, Target
from bench.turns import middle
from bench.vllm_serving import Load, model_of, require_vllm, serving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.core import Benchmark, Conditions
    from bench.vllm_serving import Served
    from verl_contracts.clock import Deadline
    from verl_contracts.events import JsonValue
    from verl_contracts.rollout import LLMServerManager
    from verl_contracts.tokens import Completion, GenerationRequest

__all__ = ["BENCHMARKS", "NEED_VLLM"]

LIMIT_S = 120.0
WINDOW_S = 0.5
"""Time over which tokens are counted."""
_names = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Milliseconds from the call of `update_weights` to the first token that the new weights made."""

    name: str
    engine: str
    target: Target
    load: Load
    baseline: str | None = None

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Several updates of one replica, after one that is left out."""
        if self.engine == "vllm":
            require_vllm()
        totals, phases = asyncio.run(self._play(conditions))
        settings = f"{self.load.describe()}; one idle replica of the engine {self.engine}, Ray, shm"
        rows = [_milliseconds(self.name, totals, target=self.target, settings=settings)]
        return (*rows, *(_milliseconds(f"{self.name}/{name}", seconds) for name, seconds in phases.items()))

    async def _play(self, conditions: Conditions) -> tuple[list[float], dict[str, list[float]]]:
        model, settings = model_of(self.load, conditions)
        settings = replace(settings, engine=self.engine)
        events = _Told()
        totals: list[float] = []
        phases: dict[str, list[float]] = {}
        async with serving(settings, model, events=events) as served:
            prompt = self.load.prompts(model.config.vocab_size)[0]
            for version in range(1, conditions.pairs + 2):
                events.when["pause"] = asyncio.Event()
                begun = time.perf_counter()
                update = asyncio.create_task(_update(served, version))
                await asyncio.wait_for(events.when["pause"].wait(), LIMIT_S)
                # It comes to a replica that is paused, and is let in with the new weights.
                reply = await _generate(served, _request(prompt, 1, min_version=version))
                seconds = time.perf_counter() - begun
                report = await asyncio.wait_for(update, LIMIT_S)
                if reply.spans[0].version != version:
                    raise BenchError(f"the token is of version {reply.spans[0].version}, not {version}")
                if version > 1:
                    totals.append(seconds)
                    for name, value in report.items():
                        phases.setdefault(name, []).append(value)
        return totals, phases


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingUpdate:
    """Fewest tokens in any window while updates go round, over those of undisturbed windows."""

    name: str = "rolling_update_tokens"
    target: Target = field(default_factory=lambda: Target(limit=0.6))
    replicas: int = 3
    load: Load = field(default_factory=lambda: Load(model="toy", requests=24, prompt_tokens=8, new_tokens=200, width=8))
    baseline: str | None = "the same load with no update"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate undisturbed windows with such in which one update follows the other."""
        rolling = asyncio.run(self._play(conditions, 1))
        at_once = asyncio.run(self._play(conditions, None))
        settings = (
            f"{self.load.describe()}; {self.replicas} embedded replicas, Ray; windows of {WINDOW_S:g} s, updates in "
            "flight (keep) one after the other; (n - 1) / n of 0.9 is 0.6"
        )
        claim = self._row(self.name, rolling, target=self.target, settings=settings)
        return claim, self._row(f"{self.name}/all_at_once", at_once, settings=settings)

    def _row(self, name: str, shares: list[float], *, settings: str, target: Target | None = None) -> Row:
        figure, spread = middle(shares)
        return Row(
            name=name,
            figure=figure,
            spread=spread,
            count=len(shares),
            baseline=self.baseline,
            target=target,
            settings=settings,
            leaves_out="training beside it",
        )

    async def _play(self, conditions: Conditions, at_once: int | None) -> list[float]:
        logging.getLogger("verl_ckpt_engine.manager").setLevel(logging.ERROR)  # it warns of weights that never change
        model, settings = model_of(self.load, conditions)
        settings = replace(settings, engine="torch")
        shares: list[float] = []
        version = 0
        async with serving(
            settings, model, replicas=self.replicas, pause_mode="keep", replicas_at_once=at_once
        ) as served:
            prompts = self.load.prompts(model.config.vocab_size)
            stop = asyncio.Event()
            clients = [asyncio.create_task(self._ask_on(served, prompt, stop)) for prompt in prompts]
            try:
                await asyncio.sleep(1.0)
                for _ in range(conditions.pairs):
                    before = await _windows(served.servers, 4)
                    done = asyncio.Event()
                    counting = asyncio.create_task(_windows(served.servers, 6, done))
                    while not done.is_set():
                        version += 1
                        await _update(served, version)
                    during = await asyncio.wait_for(counting, LIMIT_S)
                    shares.append(min(during) / statistics.median(before))
            finally:
                stop.set()
                await asyncio.wait_for(asyncio.gather(*clients), LIMIT_S)
        return shares

    async def _ask_on(self, served: Served, prompt: tuple[int, ...], stop: asyncio.Event) -> None:
        """Generate again and again, and check which weights are said to have made what."""
        while not stop.is_set():
            reply = await _generate(served, _request(prompt, self.load.new_tokens))
            versions = [span.version for span in reply.spans]
            covered = [position for span in reply.spans for position in range(span.start, span.end)]
            if covered != list(range(len(reply.token_ids))) or versions != sorted(set(versions)):
                raise BenchError(f"{len(reply.token_ids)} tokens came with the spans {reply.spans}")


class _Told:
    """Sets an event when a phase is over that comes before the awaited one."""

    def __init__(self) -> None:
        self.when: dict[str, asyncio.Event] = {}

    def emit(self, name: str, fields: Mapping[str, JsonValue], /) -> None:
        """Look for the phase."""
        if name == "sync.phase" and str(fields["phase"]) in self.when:
            self.when[str(fields["phase"])].set()


async def _windows(servers: LLMServerManager, count: int, done: asyncio.Event | None = None) -> list[float]:
    """Return tokens per second in each of some windows."""
    found = []
    at, tokens = time.perf_counter(), await _tokens(servers)
    for _ in range(count):
        await asyncio.sleep(WINDOW_S)
        now, more = time.perf_counter(), await _tokens(servers)
        found.append((more - tokens) / (now - at))
        at, tokens = now, more
    if done is not None:
        done.set()
    return found


async def _tokens(servers: LLMServerManager) -> int:
    rows = await asyncio.gather(*(replica.status(deadline=_soon()) for replica in servers.replicas()))
    return sum(row.generated_tokens for row in rows)


async def _update(served: Served, version: int) -> Mapping[str, float]:
    report = await served.checkpoint.update_weights(version, deadline=_soon())
    return report.seconds


async def _generate(served: Served, request: GenerationRequest) -> Completion:
    from verl_contracts.tokens import Completion

    reply = await served.client.generate(request, deadline=_soon())
    if not isinstance(reply, Completion):
        raise BenchError(f"request {request.request_id} was not completed")
    return reply


def _request(prompt: tuple[int, ...], new_tokens: int, min_version: int = 0) -> GenerationRequest:
    from verl_contracts.tokens import GenerationRequest, SampleKey, SamplingParams

    name = f"bench-{next(_names)}"
    return GenerationRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=new_tokens),
        key=SampleKey(uid=name, sample=0, turn=0),
        min_version=min_version,
    )


def _soon() -> Deadline:
    from verl_contracts.clock import Deadline, SystemClock

    return Deadline.after(SystemClock(), LIMIT_S)


def _milliseconds(name: str, seconds: list[float], *, target: Target | None = None, settings: str = "") -> Row:
    figure, spread = middle([1000.0 * value for value in seconds])
    return Row(
        name=name,
        figure=figure,
        spread=spread,
        count=len(seconds),
        unit="ms",
        target=target,
        settings=settings,
        leaves_out="a training step before it" if target is not None else "see the claim",
    )


_SMOLLM2 = Load(model="smollm2", requests=1, prompt_tokens=16, new_tokens=1, width=8)
NEED_VLLM: tuple[Benchmark, ...] = (
    FirstToken(
        name="update_to_first_token_vllm_ms", engine="vllm", target=Target(limit=1000, at_least=False), load=_SMOLLM2
    ),
)
BENCHMARKS: tuple[Benchmark, ...] = (
    FirstToken(
        name="update_to_first_token_embedded_ms",
        engine="torch",
        target=Target(limit=1000, at_least=False),
        load=_SMOLLM2,
    ),
    RollingUpdate(),
)
