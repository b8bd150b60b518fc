"""One vLLM for many tests: it takes long to start, and its asyncio face belongs to one event loop.

Each test gets an engine of its own around a vLLM that is kept: with no weights, nothing in flight and an empty cache,
as if it were new. `FreshEngine` is the real thing, for tests that kill it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self, TypeVar, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from verl_ckpt_engine.planner import SingleHostPlanner
from verl_ckpt_engine.shm.sender import ShmSender
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.plugins import build_config
from verl_contracts.rollout import RolloutSettings
from verl_contracts.testing.tensors import ListSource
from verl_rollout.engine.vllm.builds import on_cpu
from verl_rollout.engine.vllm.causes import Causes
from verl_rollout.engine.vllm.engine import VLLMEngine
from verl_rollout.engine.vllm.options import VLLMOptions
from verl_rollout.engine.vllm.starting import start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_contracts.clock import Clock
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import TransferReport, WeightReceiverHost, WeightSource

T = TypeVar("T")

CLOCK = SystemClock()
LOOP = asyncio.new_event_loop()
VOCAB = 61
_KEPT: dict[str, tuple[AsyncLLM, Causes]] = {}
_sessions = itertools.count()


def soon(seconds: float = 60.0) -> Deadline:
    """Return a deadline that a healthy engine keeps."""
    return Deadline.after(CLOCK, seconds)


def on_loop(case: Coroutine[object, object, T], limit_s: float = 100.0) -> T:
    """Run a test's body on the loop that the kept engines belong to."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await case

    return LOOP.run_until_complete(limited())


class SharedEngine(VLLMEngine):
    """An engine around a vLLM that outlives it."""

    @classmethod
    def create(cls, settings: RolloutSettings, /, *, replica_id: str, rank: int, clock: Clock) -> Self:
        """Start vLLM the first time that these settings are seen."""
        options = build_config(VLLMOptions, settings.engine_options, key="engine_kwargs")
        key = repr((settings, rank))
        if key not in _KEPT:
            causes = Causes()
            _KEPT[key] = start(settings, options, rank=rank, causes=causes), causes
        llm, causes = _KEPT[key]
        return cls(llm, settings, options, causes=causes, replica_id=replica_id, clock=clock)

    async def close(self) -> None:
        """Leave vLLM as it was found."""
        await self._openai.close()
        await self._llm.pause_generation(mode="abort", clear_cache=True)
        await self._llm.resume_generation()
        for name in self._adapters.known or ():
            await self._adapters.unload(name)
        await self._adapters.shut_down()
        await self._receivers.shut_down()


def end_all() -> None:
    """Stop all kept engines."""
    while _KEPT:
        _, (llm, _) = _KEPT.popitem()
        llm.shutdown(30.0)


def tiny_model(folder: Path, *, seed: int = 0, heads: int = 4) -> PreTrainedModel:
    """Save a model of two layers, whose distributions are sharp enough to compare choices."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0 if parameter.shape[0] == VOCAB else 3.0)
    model.requires_grad_(False).train(mode=False)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return model


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the canonical tensors of `model`."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def devices() -> int:
    """Return how many devices replicas can have here; on CPU a device is a core."""
    return len(os.sched_getaffinity(0)) if on_cpu() else torch.cuda.device_count()


def need_two_devices() -> None:
    """Skip a test that needs two devices where there are fewer."""
    if devices() < 2:
        pytest.skip(f"needs two devices, and here is {devices()}")


def settings_of(folder: Path, **changes: object) -> RolloutSettings:
    """Return settings for a small engine; on a GPU several fit beside each other, and start quickly."""
    small = {} if on_cpu() else {"gpu_memory_utilization": 0.1, "kv_cache_gib": 0.5, "enforce_eager": True}
    options = changes.pop("engine_options", {})
    fields: dict[str, object] = {
        "model_path": str(folder),
        "engine": "vllm",
        "engine_options": {**small, **cast("Mapping[str, object]", options)},
        "max_model_len": 640,
        "max_num_seqs": 8,
        "options": {} if on_cpu() else {"gpus_per_device": 1.0},
        **changes,
    }
    return RolloutSettings(**fields)  # type: ignore[arg-type]


async def send(
    host: WeightReceiverHost, source: WeightSource, version: int, *, keep_cache: bool = False, bucket: int = 1 << 20
) -> Sequence[TransferReport]:
    """Move `source` through shared memory to a paused engine, and commit it; digests of all ranks agree."""
    manifest, session = source.manifest(version), f"test{next(_sessions)}"
    sender = ShmSender(owner="trainer", rank=0, clock=CLOCK)
    mine = sender.prepare(manifest, session=session)
    try:
        theirs = await host.prepare(manifest, session=session, deadline=soon())
        plan = SingleHostPlanner().plan(
            manifest, session=session, senders=[mine], receivers=theirs, bucket_bytes=bucket
        )
        receiving = asyncio.ensure_future(host.transfer(plan, deadline=soon()))
        sending = asyncio.create_task(asyncio.to_thread(sender.send, plan, source, deadline=soon()))
        await asyncio.wait((receiving,), timeout=60.0)
        if receiving.exception() is not None:
            sender.abort("the receivers failed")
        await asyncio.wait((sending,), timeout=60.0)
        reports, sent = receiving.result(), sending.result()
        assert all(report.digests == sent.digests for report in reports)
        await host.commit(version, keep_cache=keep_cache, deadline=soon())
        return reports
    finally:
        sender.close()
        await host.close(deadline=soon())


@asynccontextmanager
async def serving(
    settings: RolloutSettings, weights: Mapping[str, torch.Tensor], *, rank: int = 0
) -> AsyncIterator[SharedEngine]:
    """Yield an engine that serves `weights` as version 1."""
    engine = await asyncio.to_thread(
        SharedEngine.create, settings, replica_id=f"replica-{rank}", rank=rank, clock=CLOCK
    )
    try:
        await update(engine, weights, 1)
        yield engine
    finally:
        await engine.close()


async def update(
    engine: VLLMEngine,
    weights: Mapping[str, torch.Tensor],
    version: int,
    *,
    mode: str = "abort",
) -> None:
    """Pause, send, commit, resume."""
    await engine.pause(mode, deadline=soon())  # type: ignore[arg-type]
    await send(engine.receiver_host, ListSource(weights), version, keep_cache=mode == "keep")
    await engine.resume()


async def complete(engine: VLLMEngine, requests: Sequence[GenerationRequest]) -> list[Completion | AbortedCompletion]:
    """Run requests at once."""
    return await asyncio.gather(*(engine.generate(request, deadline=soon()) for request in requests))
