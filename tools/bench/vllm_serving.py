"""Replicas behind our manager, and bare vLLM with the same arguments and requests: for rows that compare them."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from bench.core import BenchError
from bench.mended import mend_head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from transformers import PreTrainedModel
    from vllm.v1.engine.async_llm import AsyncLLM

    from bench.core import Conditions
    from verl_contracts.events import EventSink
    from verl_contracts.rollout import LLMClient, LLMServerManager, PauseMode, RolloutSettings
    from verl_contracts.tokens import GenerationRequest
    from verl_contracts.weights import CheckpointEngineManager

__all__ = ["Load", "Served", "ask", "ask_bare", "bare", "cores", "installed", "model_of", "require_vllm", "serving"]

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
class Served:
    """Replicas that serve."""

    client: LLMClient
    checkpoint: CheckpointEngineManager
    servers: LLMServerManager


@asynccontextmanager
async def serving(
    settings: RolloutSettings,
    model: PreTrainedModel,
    *,
    replicas: int = 1,
    options: Mapping[str, object] | None = None,
    pause_mode: PauseMode = "abort",
    replicas_at_once: int | None = None,
    events: EventSink | None = None,
) -> AsyncIterator[Served]:
    """Yield replicas on Ray that serve the weights of `model` as version 0."""
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

    # Both sides have the same claim to the cores: Ray would put its processes behind all others.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's spelling
    clock, events = SystemClock(), events or NullEvents()
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
            CheckpointSettings(pause_mode=pause_mode, replicas_at_once=replicas_at_once),
            sender=LocalSenderHost(ShmSender(owner="trainer", rank=0, clock=clock), weights, clock=clock),
            replicas=manager.replicas(),
            clock=clock,
            events=events,
        )
        await checkpoint.update_weights(0, deadline=deadline)
        await manager.admit([replica.replica_id for replica in manager.replicas()])
        yield Served(client=manager.client(), checkpoint=checkpoint, servers=manager)
    finally:
        await runtime.close(deadline=Deadline.after(clock, LIMIT_S))


@asynccontextmanager
async def bare(settings: RolloutSettings, options: Mapping[str, object]) -> AsyncIterator[AsyncLLM]:
    """Yield a vLLM of this process, with the arguments that ours has but for the way that its weights come."""
    from verl_rollout.engine.vllm.arguments import engine_arguments
    from verl_rollout.engine.vllm.options import VLLMOptions
    from verl_rollout.engine.vllm.starting import environment_of, launch

    made = VLLMOptions(**options)  # type: ignore[arg-type]
    arguments = {**engine_arguments(settings, made, rank=0), "load_format": "auto", "weight_transfer_config": None}
    llm = await asyncio.to_thread(launch, arguments, environment_of(settings, made, rank=0))
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.shutdown, 30.0)


async def ask(client: LLMClient, prompts: list[tuple[int, ...]], new_tokens: int, round_: int) -> int:
    """Ask ours for all prompts at once; return the tokens that came."""
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


async def ask_bare(llm: AsyncLLM, prompts: list[tuple[int, ...]], new_tokens: int, round_: int) -> int:
    """Ask bare vLLM for all prompts at once; return the tokens that came."""
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


def model_of(load: Load, conditions: Conditions) -> tuple[PreTrainedModel, RolloutSettings]:
    """Return the model that is served, and settings for it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from verl_contracts.rollout import RolloutSettings
    from verl_trainers.recipes import toy

    folder = conditions.smollm2
    if load.model == "toy":
        folder = conditions.folder / "toy"
        toy.write_model(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = max(config["max_position_embeddings"], load.prompt_tokens + load.new_tokens)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
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


def cores() -> list[int]:
    """Return the two cores that everything is measured on."""
    return sorted(os.sched_getaffinity(0))[:2]


def installed() -> bool:
    """Return whether these claims can be measured here."""
    return find_spec("vllm") is not None


def require_vllm() -> None:
    """Raise `BenchError` where there is no vLLM."""
    if not installed():
        raise BenchError("vLLM is not installed here; use `tools/nox -s bench-vllm`")
