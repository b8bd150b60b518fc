"""The asyncio face: states, pauses, budgets, limits, and what happens when the thread dies."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from engine_models import CLOCK, VOCAB, complete, meta_of, opened, request_of, settings_of, soon, sync, tensors_of
from transformers import AutoConfig

from verl_contracts.errors import ConfigError, DataError, StateError, WaitTimeout, WeightSyncError
from verl_contracts.rollout import ASLEEP, DEAD, INVALID, PAUSED, SERVING
from verl_contracts.tokens import AbortedCompletion, Completion
from verl_rollout.engine.torch.engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from engine_models import Tiny

    from verl_contracts.tokens import GenerationRequest

    Answer = asyncio.Task[Completion | AbortedCompletion]

LONG = 2000
SMALL = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def start(engine: TorchEngine, request: GenerationRequest, seconds: float = 30.0) -> Answer:
    return asyncio.create_task(engine.generate(request, deadline=soon(seconds)))


async def until_decoding(engine: TorchEngine, tokens: int = 1) -> None:
    """Return once the engine has generated `tokens` more."""
    begin = engine.status().generated_tokens
    async with asyncio.timeout(20):
        while engine.status().generated_tokens < begin + tokens:  # noqa: ASYNC110 - a status is polled
            await asyncio.sleep(0)


@asynccontextmanager
async def long_engine(tiny: Tiny, **changes: object) -> AsyncIterator[TorchEngine]:
    async with opened(settings_of(tiny.path, max_model_len=LONG + 10, **changes), tiny.model) as engine:
        yield engine


@pytest.mark.parametrize(("prompt", "fits"), [(55, True), (56, True), (57, False)])
async def test_a_request_is_refused_when_it_exceeds_the_budget(qwen: Tiny, prompt: int, fits: bool) -> None:
    async with opened(settings_of(qwen.path), qwen.model) as engine:
        request = request_of([1] * prompt, max_tokens=8)
        if fits:
            assert len(complete(await engine.generate(request, deadline=soon())).token_ids) == 8
        else:
            with pytest.raises(DataError, match=r"57 prompt tokens .* 8 > max_model_len 64"):
                await engine.generate(request, deadline=soon())


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (request_of([]), "0 prompt tokens"),
        (request_of([1, VOCAB]), "token ids 1..31"),
        (request_of([-1, 2]), "token ids -1..2"),
        (request_of([1, 2], resumed=2), "2 of them resumed"),
    ],
)
async def test_a_bad_request_is_refused_and_the_engine_lives(
    qwen: Tiny, request_: GenerationRequest, words: str
) -> None:
    async with opened(settings_of(qwen.path), qwen.model) as engine:
        with pytest.raises(DataError, match=words):
            await engine.generate(request_, deadline=soon())
        assert complete(await engine.generate(request_of([1]), deadline=soon())).token_ids


async def test_an_id_is_refused_when_it_is_in_flight(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        first = start(engine, request_of([1], max_tokens=LONG))
        await until_decoding(engine)
        with pytest.raises(DataError, match="in flight"):
            await engine.generate(request_of([2]), deadline=soon())
        await engine.abort(["r"], reason="test")
        assert isinstance(await first, AbortedCompletion)
        assert complete(await engine.generate(request_of([2]), deadline=soon()))


async def test_generate_raises_when_no_weights_were_committed(qwen: Tiny) -> None:
    async with opened(settings_of(qwen.path), None) as engine:
        assert engine.status().state == INVALID
        assert engine.status().version is None
        with pytest.raises(StateError, match="no weights committed yet"):
            await engine.generate(request_of([1]), deadline=soon())
        await engine.resume()
        with pytest.raises(StateError, match="no weights committed yet"):
            await engine.generate(request_of([1]), deadline=soon())


async def test_pause_abort_returns_tokens_so_far_and_newcomers_wait(qwen: Tiny) -> None:
    async with long_engine(qwen, max_num_seqs=2) as engine:
        tasks = [start(engine, request_of([i + 1], max_tokens=LONG, name=str(i))) for i in range(2)]
        await until_decoding(engine, 10)
        queued = start(engine, request_of([7], max_tokens=3, name="queued"))
        await engine.pause("abort", deadline=soon())
        assert engine.status().state == PAUSED
        cut = await asyncio.gather(*tasks)
        assert all(isinstance(value, AbortedCompletion) and value.token_ids for value in cut)
        newcomer = start(engine, request_of([8], max_tokens=3, name="new"))
        await engine.pause("abort", deadline=soon())
        decoded = engine.status().generated_tokens
        assert engine.status().running == 0
        assert engine.status().waiting == 2
        await engine.resume()
        assert len(complete(await queued).token_ids) == len(complete(await newcomer).token_ids) == 3
        assert engine.status().generated_tokens == decoded + 6
        assert engine.status().state == SERVING


async def test_pause_wait_finishes_what_runs_and_nothing_else(qwen: Tiny) -> None:
    async with long_engine(qwen, max_num_seqs=2) as engine:
        tasks = [start(engine, request_of([i + 1], max_tokens=50, name=str(i))) for i in range(2)]
        await until_decoding(engine)
        queued = start(engine, request_of([7], max_tokens=3, name="queued"))
        await engine.pause("wait", deadline=soon())
        assert engine.status().running == 0
        assert [len(complete(value).token_ids) for value in await asyncio.gather(*tasks)] == [50, 50]
        assert not queued.done()
        await engine.resume()
        complete(await queued)


async def test_pause_wait_raises_at_its_deadline_and_resume_repairs(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        task = start(engine, request_of([1], max_tokens=LONG))
        await until_decoding(engine)
        with pytest.raises(WaitTimeout, match="pause"):
            await engine.pause("wait", deadline=soon(0.02))
        await engine.resume()
        assert engine.status().state == SERVING
        complete(await engine.generate(request_of([2], max_tokens=2, name="other"), deadline=soon()))
        await engine.abort(None, reason="test")
        assert isinstance(await task, AbortedCompletion)


async def test_keep_continues_under_new_weights_when_synced(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        task = start(engine, request_of([1, 2], max_tokens=300))
        await until_decoding(engine, 20)
        await engine.pause("keep", deadline=soon())
        assert engine.status().running == 1
        await sync(engine, qwen.other, 2, keep_cache=True)
        await engine.resume()
        done = complete(await task)
    assert [(span.version, span.kv_version) for span in done.spans] == [(1, 1), (2, 1)]
    assert done.spans[0].end >= 20
    assert done.spans[-1].end == len(done.token_ids) == len(done.logprobs) == 300


async def test_a_request_that_arrives_during_an_update_waits_for_the_new_version(qwen: Tiny) -> None:
    async with opened(settings_of(qwen.path), qwen.model) as engine:
        await engine.pause("abort", deadline=soon())
        engine.begin_update()
        assert engine.status().state == INVALID
        task = start(engine, request_of([1], max_tokens=2, min_version=2))
        await asyncio.sleep(0)
        engine.target().load(tensors_of(qwen.other))
        await engine.commit(2, keep_cache=False)
        assert not task.done()
        await engine.resume()
        assert complete(await task).spans[0].version == 2


async def test_a_failed_update_leaves_an_invalid_engine_until_the_next_sync(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        frozen = start(engine, request_of([1], max_tokens=LONG, name="frozen"))
        await until_decoding(engine)
        await engine.pause("keep", deadline=soon())
        engine.begin_update()
        waiting = start(engine, request_of([2], name="waiting"))
        with pytest.raises(WeightSyncError, match="did not arrive"):
            engine.target().load(itertools.islice(tensors_of(qwen.other), 4))
        with pytest.raises(StateError, match="not loaded completely"):
            await engine.commit(2, keep_cache=True)
        await engine.resume()
        assert isinstance(await frozen, AbortedCompletion)
        with pytest.raises(StateError, match="holds no committed weights"):
            await waiting
        assert engine.status().state == INVALID
        with pytest.raises(StateError):
            await engine.generate(request_of([3]), deadline=soon())
        await engine.pause("abort", deadline=soon())
        await sync(engine, qwen.model, 2)
        await engine.resume()
        assert complete(await engine.generate(request_of([3]), deadline=soon())).spans[0].version == 2


async def test_an_update_is_refused_when_the_engine_is_not_paused(qwen: Tiny) -> None:
    async with opened(settings_of(qwen.path), qwen.model) as engine:
        with pytest.raises(StateError, match="pause and wake it"):
            engine.begin_update()
        with pytest.raises(StateError, match="begin_update first"):
            engine.target().load(tensors_of(qwen.model))
        with pytest.raises(StateError, match="no update was begun"):
            await engine.commit(2, keep_cache=False)
        assert engine.status().version == 1


async def test_every_order_of_sleep_and_sync_is_served_or_refused(qwen: Tiny) -> None:
    """Plays all orders of five moves and compares what happens with a model of the rules."""
    async with opened(settings_of(qwen.path, max_num_seqs=1), qwen.model) as engine:
        for order in itertools.permutations(("sleep", "wake", "begin+load", "commit", "resume")):
            await engine.wake()
            await engine.pause("abort", deadline=soon())
            await sync(engine, qwen.model, 1)
            asleep, begun, valid, paused = False, False, True, True
            for move in order:
                legal = {
                    "sleep": paused and not begun,
                    "wake": True,
                    "begin+load": paused and not asleep,
                    "commit": begun,
                    "resume": not asleep,
                }[move]
                if not legal:
                    with pytest.raises(StateError):
                        await _play(engine, qwen, move)
                    continue
                await _play(engine, qwen, move)
                asleep = (asleep or move == "sleep") and move != "wake"
                begun = (begun or move == "begin+load") and move not in {"commit", "resume"}
                valid = (valid and move not in {"sleep", "begin+load"}) or move == "commit"
                paused = paused and move != "resume"
            state = ASLEEP if asleep else INVALID if not valid else PAUSED if paused else SERVING
            assert engine.status().state == state, order
            if state == SERVING:
                complete(await engine.generate(request_of([1], max_tokens=2), deadline=soon()))
            elif not valid and not begun:
                with pytest.raises(StateError):
                    await engine.generate(request_of([1], max_tokens=2), deadline=soon())


async def _play(engine: TorchEngine, tiny: Tiny, move: str) -> None:
    match move:
        case "sleep":
            await engine.sleep()
        case "wake":
            await engine.wake()
        case "begin+load":
            engine.begin_update()
            engine.target().load(tensors_of(tiny.model))
        case "commit":
            await engine.commit(2, keep_cache=False)
        case _:
            await engine.resume()


async def test_memory_is_given_back_when_asleep_and_results_are_the_same_after(tiny: Tiny) -> None:
    async with opened(settings_of(tiny.path), tiny.model) as engine:
        before = complete(await engine.generate(request_of([1, 2, 3], max_tokens=9), deadline=soon()))
        await engine.pause("abort", deadline=soon())
        await engine.sleep()
        await engine.sleep()
        assert sum(p.numel() for p in engine._model.parameters()) == 0
        assert engine._decoder._cache.data.numel() == 0
        await engine.wake()
        await engine.wake()
        await sync(engine, tiny.model, 2)
        await engine.resume()
        after = complete(await engine.generate(request_of([1, 2, 3], max_tokens=9), deadline=soon()))
    assert after.token_ids == before.token_ids
    assert after.logprobs == before.logprobs


async def test_a_request_raises_at_its_deadline_and_frees_its_slot(qwen: Tiny) -> None:
    async with long_engine(qwen, max_num_seqs=1) as engine:
        with pytest.raises(WaitTimeout, match="request 'r'"):
            await engine.generate(request_of([1], max_tokens=LONG), deadline=soon(0.05))
        complete(await engine.generate(request_of([2], max_tokens=2), deadline=soon()))
        assert engine.status().running == 0


async def test_a_slot_is_freed_when_its_caller_is_cancelled(qwen: Tiny) -> None:
    async with long_engine(qwen, max_num_seqs=1) as engine:
        task = start(engine, request_of([1], max_tokens=LONG))
        await until_decoding(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        complete(await engine.generate(request_of([2], max_tokens=2), deadline=soon()))


async def test_everybody_hears_the_first_error_when_the_thread_dies(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        tasks = [start(engine, request_of([i + 1], max_tokens=LONG, name=str(i))) for i in range(6)]
        await until_decoding(engine)
        with torch.no_grad():
            next(p for name, p in engine._model.named_parameters() if "o_proj" in name).data = torch.zeros(3, 3)
        values = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(value, RuntimeError) and "cannot be multiplied" in str(value) for value in values)
        assert engine.status().state == DEAD
        for call in (engine.resume(), engine.generate(request_of([1]), deadline=soon()), engine.sleep()):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                await call


async def test_requests_fail_when_the_engine_is_closed(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        task = start(engine, request_of([1], max_tokens=LONG))
        await until_decoding(engine)
        await engine.close()
        with pytest.raises(StateError, match="was closed"):
            await task
        with pytest.raises(StateError, match="was closed"):
            await engine.generate(request_of([1]), deadline=soon())
        await engine.close()


async def test_target_names_what_is_wrong_when_tensors_do_not_fit(llama: Tiny) -> None:
    good = list(tensors_of(llama.model))
    name, tensor = good[1][0].name, good[1][1]
    cases = {
        "no such tensor": [(meta_of("model.nothing", tensor), tensor)],
        "arrived twice": [good[1], good[1]],
        r"\(5,\) arrived": [(meta_of(name, torch.zeros(5)), torch.zeros(5))],
        "1 of 30 tensors did not arrive: lm_head.weight": good[:-1],
        "did not arrive": [],
    }
    async with opened(settings_of(llama.path), llama.model) as engine:
        await engine.pause("abort", deadline=soon())
        for words, items in cases.items():
            engine.begin_update()
            with pytest.raises(WeightSyncError, match=words):
                engine.target().load(items)
            with pytest.raises(StateError):
                await engine.commit(2, keep_cache=False)


async def test_a_tied_head_is_skipped_when_it_arrives_as_well(qwen: Tiny) -> None:
    items = [(meta_of(n, t), t) for n, t in qwen.other.state_dict().items()]
    assert {meta.name for meta, _ in items} >= {"lm_head.weight", "model.embed_tokens.weight"}
    async with opened(settings_of(qwen.path), qwen.model) as engine:
        for given in (items, items[::-1]):
            await engine.pause("abort", deadline=soon())
            engine.begin_update()
            report = engine.target().load(given)
            await engine.commit(2, keep_cache=False)
            await engine.resume()
            assert len(report.skipped) == 1
            assert set(report.skipped) <= {"lm_head.weight", "model.embed_tokens.weight"}


def test_create_names_the_key_when_there_is_no_model(tmp_path: Path) -> None:

    with pytest.raises(ConfigError, match="model_path"):
        TorchEngine.create(settings_of(tmp_path), replica_id="x", rank=0, clock=CLOCK)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "window 16 < .* 64"),
        ("mistral", {"sliding_window": 8}, "window 8 < .* 64"),
        ("gemma2", {"head_dim": 16}, "'softcap'"),
        ("deepseek_v3", {}, "does not run with 2 key heads"),
        ("bloom", {}, "BloomForCausalLM does not take"),
    ],
)
def test_create_refuses_attention_that_it_would_compute_wrongly(
    tmp_path: Path, kind: str, values: dict[str, object], words: str
) -> None:
    AutoConfig.for_model(kind, **SMALL, **values).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        TorchEngine.create(settings_of(tmp_path), replica_id="x", rank=0, clock=CLOCK)


def test_create_draws_no_random_numbers(qwen: Tiny) -> None:

    state = torch.random.get_rng_state()
    engine = TorchEngine.create(settings_of(qwen.path), replica_id="x", rank=0, clock=CLOCK)
    asyncio.run(engine.close())
    assert torch.equal(state, torch.random.get_rng_state())
