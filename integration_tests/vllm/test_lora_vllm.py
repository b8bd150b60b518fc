"""LoRA adapters in vLLM: the tokens of merged weights, over whichever weights were sent last, and nothing silent."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from adapters import merged, write_adapter
from shared import complete, need_two_devices, on_loop, send, serving, settings_of, soon, tiny_model, update, weights_of
from texts import compare, greedy

from verl_contracts.errors import DataError, StateError, WaitTimeout
from verl_contracts.rollout import KEEP, LORA
from verl_contracts.testing.tensors import ListSource
from verl_contracts.tokens import Completion

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_contracts.rollout import RolloutSettings
    from verl_contracts.tokens import GenerationRequest


def adapting(folder: Path) -> RolloutSettings:
    return settings_of(folder, engine_options={"max_loras": 2, "max_lora_rank": 8})


def with_adapter(requests: Sequence[GenerationRequest], name: str | None) -> list[GenerationRequest]:
    return [replace(each, request_id=f"{each.request_id}-{name}", adapter=name) for each in requests]


@pytest.fixture(scope="module")
def two(tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two adapters: one over all linear layers, one of a lower rank over some."""
    folder = tmp_path_factory.mktemp("adapters")
    return (
        write_adapter(folder / "all", tiny[1], seed=1),
        write_adapter(folder / "some", tiny[1], seed=2, rank=3, only="self_attn"),
    )


def test_answers_are_those_of_merged_weights_before_and_after_an_update(
    tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel, two: tuple[Path, Path]
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(adapting(folder), weights_of(model)) as engine:
            assert LORA in engine.capabilities
            for name, adapter in zip("ab", two, strict=True):
                await engine.load_adapter(name, folder=str(adapter), deadline=soon())
            plain = greedy(range(6))
            for version, truth in ((1, model), (2, other), (3, model)):
                if version > 1:
                    await update(engine, weights_of(truth), version)
                assert await engine.adapters(deadline=soon()) == ("a", "b")
                wanted = [(None, truth), ("a", merged(truth, two[0])), ("b", merged(truth, two[1]))]
                requests = [each for name, _ in wanted for each in with_adapter(plain, name)]
                replies = await complete(engine, requests)  # all of them in the same batches
                for index, (_, expected) in enumerate(wanted):
                    part = slice(index * len(plain), (index + 1) * len(plain))
                    compare(replies[part], requests[part], expected)
                    again = await complete(engine, requests[part])  # over cached prefixes
                    compare(again, requests[part], expected)
                assert len({reply.token_ids for reply in replies[:: len(plain)]}) == 3, "the adapters must show"

    on_loop(case())


def test_adapter_is_what_its_folder_held_when_it_was_loaded(
    tiny: tuple[Path, PreTrainedModel], two: tuple[Path, Path], tmp_path: Path
) -> None:
    async def case() -> None:
        folder, model = tiny
        mine = tmp_path / "adapter"
        shutil.copytree(two[0], mine)
        first = merged(model, mine)
        async with serving(adapting(folder), weights_of(model)) as engine:
            await engine.load_adapter("a", folder=str(mine), deadline=soon())
            write_adapter(mine, model, seed=3)
            second = merged(model, mine)
            with pytest.raises(StateError, match="name stands for other files; unload it or take another name"):
                await engine.load_adapter("a", folder=str(mine), deadline=soon())
            await update(engine, weights_of(model), 2)
            requests = with_adapter(greedy(range(4)), "a")
            compare(await complete(engine, requests), requests, first)
            await engine.unload_adapter("a", deadline=soon())
            await engine.load_adapter("a", folder=str(mine), deadline=soon())
            shutil.rmtree(mine)
            await update(engine, weights_of(model), 3)
            compare(await complete(engine, requests), requests, second)

    on_loop(case())


def test_keep_goes_on_with_the_adapter_over_new_weights(
    tiny: tuple[Path, PreTrainedModel], other: PreTrainedModel, two: tuple[Path, Path]
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(adapting(folder), weights_of(model)) as engine:
            if KEEP not in engine.capabilities:
                pytest.skip("this vLLM does not tell which tokens came after an update, so it keeps nothing over one")
            await engine.load_adapter("a", folder=str(two[0]), deadline=soon())
            (request,) = with_adapter(greedy([5], max_tokens=400), "a")
            running = asyncio.create_task(engine.generate(request, deadline=soon()))
            async with asyncio.timeout(30.0):
                while engine.status().generated_tokens < 17:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.002)
            await engine.pause("keep", deadline=soon())
            await send(engine.receiver_host, ListSource(weights_of(other)), 2, keep_cache=False)
            await engine.resume()
            reply = await running
            assert isinstance(reply, Completion)
            assert [(s.version, s.kv_version) for s in reply.spans] == [(1, 1), (2, 2)]
            cut = reply.spans[0].end
            before = replace(reply, token_ids=reply.token_ids[:cut], logprobs=reply.logprobs[:cut])
            compare([before], [request], merged(model, two[0]))
            longer = replace(request, prompt_ids=request.prompt_ids + reply.token_ids[:cut])
            after = replace(reply, token_ids=reply.token_ids[cut:], logprobs=reply.logprobs[cut:])
            compare([after], [longer], merged(other, two[0]))

    on_loop(case())


def test_adapter_stays_while_a_request_runs_with_it(tiny: tuple[Path, PreTrainedModel], two: tuple[Path, Path]) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(adapting(folder), weights_of(model)) as engine:
            await engine.load_adapter("a", folder=str(two[0]), deadline=soon())
            (request,) = with_adapter(greedy([3], max_tokens=400), "a")
            running = asyncio.create_task(engine.generate(request, deadline=soon()))
            async with asyncio.timeout(30.0):
                while engine.status().generated_tokens == 0:  # noqa: ASYNC110 - a status is polled
                    await asyncio.sleep(0.002)
            with pytest.raises(WaitTimeout):
                await engine.unload_adapter("a", deadline=soon(0.01))
            unloading = asyncio.create_task(engine.unload_adapter("a", deadline=soon()))
            await asyncio.sleep(0)
            with pytest.raises(DataError, match="adapter 'a', and none is loaded"):
                await engine.generate(replace(request, request_id="late"), deadline=soon())
            assert not running.done()
            await unloading
            compare([await running], [request], merged(model, two[0]))

    on_loop(case())


def test_what_does_not_fit_is_refused_and_nothing_else_suffers(
    tiny: tuple[Path, PreTrainedModel], two: tuple[Path, Path], tmp_path: Path
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(adapting(folder), weights_of(model)) as engine:
            await engine.load_adapter("a", folder=str(two[0]), deadline=soon())
            with pytest.raises(DataError, match=r"cannot load adapter 'b' from .*No such file"):
                await engine.load_adapter("b", folder=str(tmp_path), deadline=soon())
            wide = write_adapter(tmp_path / "wide", model, seed=4, rank=9)
            with pytest.raises(DataError, match="its rank r=9 is above max_lora_rank=8"):
                await engine.load_adapter("b", folder=str(wide), deadline=soon())
            head = write_adapter(tmp_path / "head", model, seed=5, only="embed_tokens")
            with pytest.raises(DataError, match=r"cannot load adapter 'b' from .*vLLM refuses it: .*embed_tokens"):
                await engine.load_adapter("b", folder=str(head), deadline=soon())
            await engine.load_adapter("b", folder=str(two[1]), deadline=soon())
            with pytest.raises(StateError, match=r"holds a, b, as many adapters as engine_kwargs.max_loras=2 allows"):
                await engine.load_adapter("c", folder=str(two[1]), deadline=soon())
            with pytest.raises(DataError, match="adapter 'c', and loaded are a, b"):
                await engine.generate(with_adapter(greedy([1]), "c")[0], deadline=soon())
            requests = with_adapter(greedy(range(4)), "b")
            compare(await complete(engine, requests), requests, merged(model, two[1]))

    on_loop(case())


def test_load_that_was_given_up_takes_no_slot(
    tiny: tuple[Path, PreTrainedModel], two: tuple[Path, Path], tmp_path: Path
) -> None:
    async def case() -> None:
        from vllm.lora.request import LoRARequest

        folder, model = tiny
        async with serving(adapting(folder), weights_of(model)) as engine:
            await engine.load_adapter("a", folder=str(two[0]), deadline=soon())
            await engine._llm.add_lora(LoRARequest("late", 77, str(write_adapter(tmp_path, model, seed=7))))
            await engine.load_adapter("b", folder=str(two[1]), deadline=soon())
            assert 77 not in await engine._llm.list_loras()
            plain = greedy(range(4))
            requests = [*plain, *with_adapter(plain, "b")]
            replies = await complete(engine, requests)
            compare(replies[:4], plain, model)  # on CPU these would show what lies in the last slot
            compare(replies[4:], requests[4:], merged(model, two[1]))

    on_loop(case())


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}], ids=["shards", "copies"])
def test_each_worker_has_the_adapter(tmp_path: Path, options: dict[str, object]) -> None:
    async def case() -> None:
        model, other = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "two", seed=1)
        adapter = write_adapter(tmp_path / "adapter", model, seed=8, rank=16)
        settings = settings_of(tmp_path / "one", devices_per_replica=2, engine_options={"max_loras": 1, **options})
        async with serving(settings, weights_of(model)) as engine:
            await engine.load_adapter("a", folder=str(adapter), deadline=soon())
            plain = greedy(range(8))
            requests = with_adapter(plain, "a")
            for truth in (model, other):
                if truth is other:
                    await update(engine, weights_of(other), 2)
                replies = await complete(engine, [*plain, *requests])
                compare(replies[:8], plain, truth)
                compare(replies[8:], requests, merged(truth, adapter))

    need_two_devices()
    on_loop(case(), 220.0)


def test_engine_without_room_for_adapters_claims_none(
    tiny: tuple[Path, PreTrainedModel], two: tuple[Path, Path]
) -> None:
    async def case() -> None:
        folder, model = tiny
        async with serving(settings_of(folder), weights_of(model)) as engine:
            assert LORA not in engine.capabilities
            with pytest.raises(StateError, match=r"set engine_kwargs.max_loras to 1 or more"):
                await engine.load_adapter("a", folder=str(two[0]), deadline=soon())
            with pytest.raises(DataError, match="this replica takes none"):
                await engine.generate(with_adapter(greedy([1]), "a")[0], deadline=soon())

    on_loop(case())
