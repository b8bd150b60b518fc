"""What must not be asked of an engine is refused with a name, and the engine is right afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from shared import CLOCK, complete, on_loop, send, serving, settings_of, soon, update, weights_of
from test_death_vllm import below
from texts import compare, greedy

from verl_contracts.errors import DataError, StateError, WeightSyncError
from verl_contracts.rollout import INVALID, SERVING
from verl_contracts.testing.tensors import ListSource
from verl_contracts.weights import Plan
from verl_rollout.engine.vllm.engine import VLLMEngine

if TYPE_CHECKING:
    from pathlib import Path

    from shared import SharedEngine
    from transformers import PreTrainedModel


async def still_right(engine: SharedEngine, model: PreTrainedModel) -> None:
    """Compare a few answers with the model."""
    assert engine.status().state == SERVING
    requests = greedy(range(3))
    compare(await complete(engine, requests), requests, model)


def test_values_that_are_no_ints_are_refused_before_they_reach_vllm(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            (request,) = greedy([1])
            sampling = request.sampling
            for wrong in (
                replace(request, prompt_ids=(1.0, 2.0)),  # type: ignore[arg-type]
                replace(request, prompt_ids=tuple(torch.tensor([1, 2, 3]))),
                replace(request, sampling=replace(sampling, max_tokens=5.0)),  # type: ignore[arg-type]
                replace(request, sampling=replace(sampling, stop_token_ids=(10**6,))),
                replace(request, sampling=replace(sampling, temperature=float("nan"))),
            ):
                with pytest.raises(DataError):
                    await engine.generate(wrong, deadline=soon())
            await still_right(engine, tiny[1])

    on_loop(case())


def test_weights_that_are_not_finite_are_refused_by_name(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            wrong = {name: tensor.clone() for name, tensor in weights_of(tiny[1]).items()}
            name = "model.layers.1.mlp.up_proj.weight"
            wrong[name][3, 5] = float("inf")
            await engine.pause("abort", deadline=soon())
            with pytest.raises(WeightSyncError, match="holds values that are not finite") as caught:
                await send(engine.receiver_host, ListSource(wrong), 2)
            assert caught.value.tensor == name
            assert engine.status().state == INVALID
            await update(engine, weights_of(tiny[1]), 3)
            await still_right(engine, tiny[1])

    on_loop(case())


def test_whole_numbers_are_no_weights_of_a_floating_model(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            wrong = weights_of(tiny[1])
            wrong["model.norm.weight"] = wrong["model.norm.weight"].to(torch.int32)
            await engine.pause("abort", deadline=soon())
            with pytest.raises(WeightSyncError, match=r"model\.norm\.weight has dtype int32, and float32 in the model"):
                await send(engine.receiver_host, ListSource(wrong), 2)
            await engine.resume()
            await still_right(engine, tiny[1])

    on_loop(case())


def test_a_second_update_does_not_break_into_the_first(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            await engine.pause("abort", deadline=soon())
            host, loop = engine.receiver_host, asyncio.get_running_loop()
            stuck, release = asyncio.Event(), asyncio.Event()

            def before(index: int) -> None:
                if index == 3:
                    loop.call_soon_threadsafe(stuck.set)
                    asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30.0)

            first = asyncio.create_task(send(host, ListSource(weights_of(tiny[1]), before=before), 2))
            async with asyncio.timeout(30.0):
                await stuck.wait()
                manifest = ListSource(weights_of(tiny[1])).manifest(3)
                plan = Plan(
                    session="second", version=3, manifest=manifest, senders=(), receivers=(), bucket_bytes=1 << 20
                )
                with pytest.raises(StateError, match="a transfer is under way"):
                    await host.transfer(plan, deadline=soon())
                release.set()
                await first
            await engine.resume()
            await still_right(engine, tiny[1])

    on_loop(case())


def test_weights_that_were_loaded_while_it_was_resumed_are_not_served(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            await engine.pause("abort", deadline=soon())
            loop = asyncio.get_running_loop()

            def before(index: int) -> None:
                if index == 3:
                    asyncio.run_coroutine_threadsafe(engine.resume(), loop).result(30.0)

            with pytest.raises(StateError, match="was resumed during the update"):
                await send(engine.receiver_host, ListSource(weights_of(tiny[1]), before=before), 2)
            assert engine.status().state == INVALID
            await update(engine, weights_of(tiny[1]), 3)
            await still_right(engine, tiny[1])

    on_loop(case())


def test_a_worker_that_was_late_once_takes_the_next_update(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        async with serving(settings_of(tiny[0]), weights_of(tiny[1])) as engine:
            stopped = below(os.getpid())  # the engines with their workers, wherever those live
            await engine.pause("abort", deadline=soon())
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            try:
                manifest = ListSource(weights_of(tiny[1])).manifest(2)
                with pytest.raises(WeightSyncError, match=r"'prepare'.*has not answered"):
                    await engine.receiver_host.prepare(manifest, session="late", deadline=soon(1.0))
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            await engine.resume()
            await update(engine, weights_of(tiny[1]), 3)
            await still_right(engine, tiny[1])

    on_loop(case())


@pytest.mark.timeout(240)
def test_an_engine_that_is_closed_in_a_transfer_ends_both(tiny: tuple[Path, PreTrainedModel]) -> None:
    async def case() -> None:
        engine = await asyncio.to_thread(
            VLLMEngine.create, settings_of(tiny[0]), replica_id="replica-9", rank=0, clock=CLOCK
        )
        loop = asyncio.get_running_loop()
        stuck, release = asyncio.Event(), asyncio.Event()

        def before(index: int) -> None:
            if index == 3:
                loop.call_soon_threadsafe(stuck.set)
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60.0)

        await engine.pause("abort", deadline=soon())
        sending = asyncio.create_task(send(engine.receiver_host, ListSource(weights_of(tiny[1]), before=before), 1))
        async with asyncio.timeout(60.0):
            await stuck.wait()
        begun = time.monotonic()
        await engine.close()
        assert time.monotonic() - begun < 20.0
        release.set()
        with pytest.raises(Exception, match=r"closed|dead"):
            await asyncio.wait_for(sending, 20.0)

    on_loop(case(), 200.0)
