"""What our manager costs over bare vLLM, what two pinned replicas bring, and what an update in flight takes.

Both sides have the same vLLM with the same arguments on the same cores; it serves one of them at a time.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from bench.core import BenchError, Row, Target
from bench.mended import MENDED, mend_head
from bench.turns import middle, ratios

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from transformers import PreTrainedModel
    from vllm.v1.engine.async_llm import AsyncLLM

    from bench.core import Benchmark, Conditions
    from verl_contracts.rollout import LLMClient, RolloutSettings
    from verl_contracts.tokens import GenerationRequest

__all__ = ["BENCHMARKS", "installed"]

LIMIT_S = 600.0
Model = Literal["toy", "smollm2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of both sides."""

    model: Model
    requests: int
    prompt_tokens: int
    new_tokens: int
    width: int
    """Sequences that one engine decodes at once."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the weights, as in the recipes."""
        return "float32" if self.model == "toy" else "bfloat16"

    def prompts(self, vocab_size: int) -> list[tuple[int, ...]]:
        """Return one prompt for each request, no two alike."""
        return [
            tuple((31 * i + 7 * j + i * j) % vocab_size for j in range(self.prompt_tokens))
            for i in range(self.requests)
        ]

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"{self.model}, {self.dtype}, {self.requests} requests, {self.width} at once, {self.prompt_tokens} tokens "
            f"in and {self.new_tokens} out, log-probs of the sampled tokens on both sides"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerVersusBare:
    """Tokens per second through client, balancer, Ray and replica, over those of `AsyncLLM.generate`."""

    name: str
    target: Target
    load: Load
    baseline: str | None = "AsyncLLM.generate in one process, all requests at once, whole answers"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate both sides."""
        _require_vllm()
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
        model, settings = _model(self.load, conditions)
        cores = _cores()
        async with AsyncExitStack() as stack:
            options = {"cpu_cores": cores}
            client = await stack.enter_async_context(serving(settings, model, options=options))
            llm = await stack.enter_async_context(bare(settings, options))
            prompts = self.load.prompts(model.config.vocab_size)
            sides: dict[str, Callable[[int], Awaitable[int]]] = {
                "ours": partial(_ask, client, prompts, self.load.new_tokens),
                "bare": partial(_ask_bare, llm, prompts, self.load.new_tokens),
            }
            return await _alternate(sides, self.load, rounds=conditions.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasVersusGenerate:
    """Tokens per second of two replicas, each pinned to a core, over those of transformers on both cores."""

    name: str = "vllm2_vs_generate"
    target: Target = field(default_factory=lambda: Target(limit=2.0))
    load: Load = field(
        default_factory=lambda: Load(model="smollm2", requests=128, prompt_tokens=24, new_tokens=32, width=64)
    )
    baseline: str | None = (
        "transformers' generate in inference mode on all cores, in one batch as wide as both replicas together; "
        + MENDED
    )

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Alternate both sides."""
        _require_vllm()
        if len(_cores()) < 2:
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

        model, settings = _model(self.load, conditions)
        torch.set_num_threads(len(_cores()))
        async with serving(settings, model, replicas=2) as client:
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
                "ours": partial(_ask, client, prompts, self.load.new_tokens),
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


async def _ask(client: LLMClient, prompts: list[tuple[int, ...]], new_tokens: int, round_: int) -> int:
    from verl_contracts.clock import Deadline, SystemClock

    deadline = Deadline.after(SystemClock(), LIMIT_S)
    replies = await asyncio.gather(
        *(
            client.generate(_request(i, prompt, new_tokens, round_), deadline=deadline)
            for i, prompt in enumerate(prompts)
        )
    )
    return sum(len(reply.token_ids) for reply in replies)


def _request(index: int, prompt: tuple[int, ...], new_tokens: int, round_: int) -> GenerationRequest:
    from verl_contracts.tokens import GenerationRequest, SampleKey, SamplingParams

    return GenerationRequest(
        request_id=f"{round_}-{index}",
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=new_tokens),
        key=SampleKey(uid=f"0-{index}-{round_}", sample=0, turn=0),
    )


async def _ask_bare(llm: AsyncLLM, prompts: list[tuple[int, ...]], new_tokens: int, round_: int) -> int:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    parameters = SamplingParams(
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def one(index: int, prompt: tuple[int, ...]) -> int:
        count = 0
        async for output in llm.generate({"prompt_token_ids": list(prompt)}, parameters, f"{round_}-{index}"):
            count = len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


@asynccontextmanager
async def serving(
    settings: RolloutSettings, model: PreTrainedModel, *, replicas: int = 1, options: Mapping[str, object] | None = None
) -> AsyncIterator[LLMClient]:
    """Yield a client of replicas on Ray that serve the weights of `model`."""
    import torch

    from verl_ckpt_engine.local_sender import LocalSenderHost
    from verl_ckpt_engine.manager import TransactionalManager
    from verl_ckpt_engine.shm.sender import ShmSender
    from verl_contracts.clock import Deadline, SystemClock
    from verl_contracts.events import NullEvents
    from verl_contracts.runtime import RuntimeSettings
    from verl_contracts.weights import CheckpointSettings
    from verl_rollout.manager import ReplicaManager
    from verl_runtime.ray import RayRuntime
    from verl_trainers.workers.source import PolicyWeights

    clock, events = SystemClock(), NullEvents()
    weights = PolicyWeights(dict(model.named_parameters()), dtype=getattr(torch, settings.dtype))
    deadline = Deadline.after(clock, LIMIT_S)
    runtime = await RayRuntime.create(
        RuntimeSettings(run_id="bench", options={"num_cpus": replicas}), clock=clock, events=events
    )
    try:
        manager = await ReplicaManager.create(
            replace(settings, num_replicas=replicas, engine_options=options or {}),
            runtime=runtime,
            grant=None,
            start_rank=None,
            events=events,
            deadline=deadline,
        )
        checkpoint = await TransactionalManager.create(
            CheckpointSettings(),
            sender=LocalSenderHost(ShmSender(owner="trainer", rank=0, clock=clock), weights, clock=clock),
            replicas=manager.replicas(),
            clock=clock,
            events=events,
        )
        await checkpoint.update_weights(0, deadline=deadline)
        await manager.admit([replica.replica_id for replica in manager.replicas()])
        yield manager.client()
    finally:
        await runtime.close(deadline=Deadline.after(clock, LIMIT_S))


@asynccontextmanager
async def bare(settings: RolloutSettings, options: Mapping[str, object]) -> AsyncIterator[AsyncLLM]:
    """Yield a vLLM of this process, with the arguments that ours has, and weights from the folder."""
    from verl_rollout.engine.vllm.options import VLLMOptions
    from verl_rollout.engine.vllm.starting import start

    made = VLLMOptions(**options)  # type: ignore[arg-type]
    llm = await asyncio.to_thread(start, settings, made, rank=0)
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.shutdown, 30.0)


def _model(load: Load, conditions: Conditions) -> tuple[PreTrainedModel, RolloutSettings]:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from verl_contracts.rollout import RolloutSettings
    from verl_trainers.recipes import toy

    folder = conditions.smollm2
    if load.model == "toy":
        folder = conditions.folder / "toy"
        toy.write_model(folder)
    elif not folder.exists():
        raise BenchError(f"{folder} is not there; make it: python tools/make_smollm2.py models/smollm2")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=load.dtype)
    model.requires_grad_(False).train(mode=False)
    mend_head(model)
    settings = RolloutSettings(
        model_path=str(folder.resolve()),
        engine="vllm",
        dtype=load.dtype,
        max_num_seqs=load.width,
        max_model_len=load.prompt_tokens + load.new_tokens,
    )
    return model, settings


def _speed(name: str, values: list[float]) -> Row:
    figure, spread = middle(values)
    return Row(name=name, figure=figure, spread=spread, count=len(values), unit="tok/s", leaves_out="see the claim")


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:2]


def installed() -> bool:
    """Return whether these claims can be measured here."""
    return find_spec("vllm") is not None


def _require_vllm() -> None:
    if not installed():
        raise BenchError("vLLM is not installed here; use `tools/nox -s bench-vllm`")


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
