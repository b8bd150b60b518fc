"""What holds of the vLLM that is installed: which models it computes, copies of one, and how it tells why it died."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest
from shared import (
    CLOCK,
    complete,
    need_two_devices,
    on_loop,
    send,
    serving,
    settings_of,
    soon,
    tiny_model,
    update,
    weights_of,
)
from texts import compare, greedy

from verl_contracts.errors import ConfigError
from verl_contracts.rollout import DEAD, KEEP
from verl_contracts.testing.tensors import ListSource
from verl_contracts.tokens import Completion
from verl_rollout.engine.vllm import arguments
from verl_rollout.engine.vllm.builds import CPU_HEAD_SIZES, known_arguments, on_cpu
from verl_rollout.engine.vllm.engine import VLLMEngine

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


async def generated(engine: VLLMEngine, tokens: int) -> None:
    """Wait until the engine has generated so many tokens."""
    async with asyncio.timeout(30.0):
        while engine.status().generated_tokens < tokens:  # noqa: ASYNC110 - a status is polled
            await asyncio.sleep(0.005)


CPU_ONLY = pytest.mark.skipif(not on_cpu(), reason="what only the CPU build cannot do")


@CPU_ONLY
def test_heads_that_the_cpu_build_computes_are_those_that_are_let_through() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES


def test_the_arguments_that_are_let_through_are_those_that_vllm_takes() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert known_arguments() == set(inspect.signature(AsyncEngineArgs).parameters)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_copies_of_one_model_are_the_model(tmp_path: Path) -> None:
    async def case() -> None:
        model, other = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "two", seed=1)
        settings = settings_of(
            tmp_path / "one", devices_per_replica=2, max_num_seqs=7, engine_options={"data_parallel_size": 2}
        )
        async with serving(settings, weights_of(model)) as engine:
            requests = greedy(range(16), max_tokens=200)
            compare(await complete(engine, requests), requests, model)
            running = [asyncio.create_task(engine.generate(request, deadline=soon())) for request in requests]
            await generated(engine, 16 * 200 + 7 * 16)
            assert (engine.status().running, engine.status().waiting) == (7, 9)
            await engine.pause("abort", deadline=soon())
            cut = await asyncio.gather(*running)
            assert any(reply.token_ids for reply in cut)
            reports = await send(engine.receiver_host, ListSource(weights_of(other)), 2)
            assert len(reports) == 2, "one worker of each copy"
            await engine.resume()
            replies = await complete(engine, requests)
            assert all(isinstance(reply, Completion) for reply in replies)
            assert {(s.version, s.kv_version) for reply in replies for s in reply.spans} == {(2, 2)}
            compare(replies, requests, other)
            if KEEP in engine.capabilities:
                before = engine.status().generated_tokens
                running = [asyncio.create_task(engine.generate(request, deadline=soon())) for request in requests[:7]]
                await generated(engine, before + 7 * 16)
                await update(engine, weights_of(model), 3, mode="keep")
                both = [{s.version for s in reply.spans} for reply in await asyncio.gather(*running)]
                assert both == [{2, 3}] * 7, "requests of both copies lived through it"

    need_two_devices()
    on_loop(case(), 220.0)


@pytest.mark.slow
@CPU_ONLY
@pytest.mark.timeout(240)
def test_a_death_is_told_with_its_first_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        model = tiny_model(tmp_path, heads=8)
        with pytest.raises(ConfigError, match="attention heads of size 16"):
            VLLMEngine.check(settings_of(tmp_path))
        monkeypatch.setattr(arguments, "CPU_HEAD_SIZES", (16,))
        engine = await asyncio.to_thread(
            VLLMEngine.create, settings_of(tmp_path), replica_id="replica-0", rank=0, clock=CLOCK
        )
        try:
            await update(engine, weights_of(model), 1)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"process of replica-0 is dead: RuntimeError: .*head"):
                    await engine.generate(greedy([1])[0], deadline=soon())
            assert engine.status().state == DEAD
        finally:
            await engine.close()

    on_loop(case(), 220.0)


@pytest.mark.slow
@CPU_ONLY
@pytest.mark.timeout(240)
def test_a_vllm_that_does_not_come_up_says_why(tiny: tuple[Path, PreTrainedModel]) -> None:
    settings = settings_of(tiny[0], engine_options={"kv_cache_gib": 1e6})
    with pytest.raises(RuntimeError, match=r"did not start: ValueError: Available memory .* is less than requested"):
        VLLMEngine.create(settings, replica_id="replica-0", rank=0, clock=CLOCK)
