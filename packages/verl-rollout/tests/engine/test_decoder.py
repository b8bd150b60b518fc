"""Admission, aborts and updates between exact iterations, on the decoder itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from engine_models import raw_logprobs, request_of, settings_of, tensors_of

from verl_contracts.errors import StateError
from verl_contracts.rollout import SERVING
from verl_contracts.tokens import AbortedCompletion, Completion, VersionSpan
from verl_rollout.engine.torch.decoder import Decoder, Job, Result
from verl_rollout.engine.torch.model import build_model
from verl_rollout.engine.torch.target import ModelTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_models import Tiny
    from transformers import PreTrainedModel

    from verl_contracts.rollout import RolloutSettings
    from verl_contracts.tokens import GenerationRequest

LENGTH = 9


class Bench:
    """A decoder, and the model that it decodes with."""

    def __init__(self, settings: RolloutSettings, weights: PreTrainedModel) -> None:
        self.model, shape = build_model(settings)
        self.decoder = Decoder(self.model, shape, settings, replica_id="replica-0")
        self.load(weights, 1)

    def load(self, weights: PreTrainedModel, version: int, *, keep_cache: bool = False) -> None:
        ModelTarget(self.model, guard=lambda: None, loaded=lambda _: None).load(tensors_of(weights))
        self.decoder.commit(version, keep_cache=keep_cache)

    def submit(self, *requests: GenerationRequest) -> list[Job]:
        jobs = [Job(request=request) for request in requests]
        for job in jobs:
            self.decoder.submit(job)
        return jobs

    def steps(self, count: int) -> list[Result]:
        results: list[Result] = []
        for _ in range(count):
            results += self.decoder.admit()
            results += self.decoder.step()
        return results

    def finish(self) -> dict[str, Completion]:
        done: dict[str, Completion] = {}
        for _ in range(1000):
            for result in self.steps(1):
                if not isinstance(result.value, Completion):
                    raise TypeError(f"expected completions only, got {result.value}")
                done[result.value.request_id] = result.value
            if not self.decoder.active and not self.decoder.waiting:
                return done
        raise TimeoutError("1000 iterations did not finish the queue")

    def cut(self) -> list[AbortedCompletion]:
        results = self.decoder.abort(lambda _: True, reason="test")
        return [result.value for result in results if isinstance(result.value, AbortedCompletion)]


@contextmanager
def bench(tiny: Tiny, **changes: object) -> Iterator[Bench]:
    with torch.inference_mode():
        yield Bench(settings_of(tiny.path, **changes), tiny.model)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cut_at", [0, 1, 4, LENGTH - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_abort_and_resume_equals_uninterrupted_when_cut_anywhere(
    tiny: Tiny, cut_at: int, temperature: float, deterministic: bool
) -> None:
    prompt = (3, 1, 4, 1, 5)
    with bench(tiny, deterministic=deterministic) as one:
        whole = request_of(prompt, max_tokens=LENGTH, temperature=temperature)
        one.submit(whole)
        wanted = one.finish()["r"]

        one.submit(whole)
        one.decoder.admit()
        one.steps(cut_at)
        (first,) = one.cut()
        assert len(first.token_ids) == len(first.logprobs) == cut_at
        rest = request_of(
            prompt + first.token_ids,
            max_tokens=LENGTH - cut_at,
            temperature=temperature,
            resumed=cut_at,
        )
        one.submit(rest)
        second = one.finish()["r"]
    assert first.token_ids + second.token_ids == wanted.token_ids
    got = first.logprobs + second.logprobs
    if deterministic:
        assert got == wanted.logprobs
    else:
        assert got == pytest.approx(wanted.logprobs, abs=1e-5)


def test_resuming_again_and_again_equals_uninterrupted_when_deterministic(qwen: Tiny) -> None:
    prompt = (3, 1, 4, 1, 5)
    with bench(qwen, deterministic=True) as one:
        one.submit(request_of(prompt, max_tokens=LENGTH))
        wanted = one.finish()["r"]
        ids: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        for _ in range(LENGTH - 1):
            one.submit(request_of(prompt + ids, max_tokens=LENGTH - len(ids), resumed=len(ids)))
            one.steps(len(ids) + 1)
            (part,) = one.cut()
            ids += part.token_ids
            logprobs += part.logprobs
        one.submit(request_of(prompt + ids, max_tokens=1, resumed=len(ids)))
        last = one.finish()["r"]
    assert len(ids) == LENGTH - 1
    assert ids + last.token_ids == wanted.token_ids
    assert logprobs + last.logprobs == wanted.logprobs


def test_spans_say_both_versions_when_the_cache_is_kept(qwen: Tiny) -> None:
    with bench(qwen) as one:
        one.submit(request_of((1, 2, 3), max_tokens=10))
        one.steps(4)
        one.load(qwen.other, 2, keep_cache=True)
        one.steps(3)
        one.load(qwen.model, 3, keep_cache=True)
        done = one.finish()["r"]
    assert done.spans == (
        VersionSpan(version=1, kv_version=1, start=0, end=4),
        VersionSpan(version=2, kv_version=1, start=4, end=7),
        VersionSpan(version=3, kv_version=1, start=7, end=10),
    )


def test_cache_is_computed_anew_when_it_is_not_kept(qwen: Tiny) -> None:
    prompt = (1, 2, 3)
    with bench(qwen) as one:
        one.submit(request_of(prompt, max_tokens=10, temperature=1.0))
        one.steps(4)
        one.load(qwen.other, 2, keep_cache=False)
        done = one.finish()["r"]
    assert [(s.version, s.kv_version, s.start, s.end) for s in done.spans] == [(1, 1, 0, 4), (2, 2, 4, 10)]
    ids = torch.tensor(done.token_ids)[:, None]
    old = raw_logprobs(qwen.model, prompt, done.token_ids).gather(1, ids)[:4, 0]
    new = raw_logprobs(qwen.other, prompt, done.token_ids).gather(1, ids)[4:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), torch.cat([old, new]), atol=1e-5, rtol=0)


def test_old_cache_is_really_used_when_it_is_kept(qwen: Tiny) -> None:
    prompt = (1, 2, 3)
    with bench(qwen) as one:
        one.submit(request_of(prompt, max_tokens=10))
        one.steps(4)
        one.load(qwen.other, 2, keep_cache=True)
        done = one.finish()["r"]
    ids = torch.tensor(done.token_ids)[:, None]
    pure = raw_logprobs(qwen.other, prompt, done.token_ids).gather(1, ids)[4:, 0]
    assert (torch.tensor(done.logprobs[4:]) - pure).abs().max() > 1e-3


@pytest.mark.parametrize("keep_cache", [False, True])
def test_same_prompt_never_meets_an_old_prefix_when_weights_change(qwen: Tiny, keep_cache: bool) -> None:
    prompt = (1, 2, 3, 4, 5, 6)
    with bench(qwen) as one:
        one.submit(request_of(prompt, max_tokens=12, name="old"))
        one.steps(3)
        one.load(qwen.other, 2, keep_cache=keep_cache)
        one.submit(request_of(prompt, max_tokens=5, name="new", sample=1))
        new = one.finish()["new"]
    assert new.spans == (VersionSpan(version=2, kv_version=2, start=0, end=5),)
    wanted = raw_logprobs(qwen.other, prompt, new.token_ids).gather(1, torch.tensor(new.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(new.logprobs), wanted, atol=1e-5, rtol=0)


def test_siblings_are_right_when_they_share_a_prefix_that_moves(qwen: Tiny) -> None:
    prompts = [(1, 2, 3, 4), (9, 8, 7), (1, 2, 3, 4), (9, 8, 7), (1, 2, 3, 4), (9, 8, 7), (1, 2, 3, 4), (5,)]
    with bench(qwen, max_num_seqs=3) as one:
        one.submit(*(request_of(p, max_tokens=3 + i % 4, name=str(i), sample=i) for i, p in enumerate(prompts)))
        done = one.finish()
    assert len(done) == len(prompts)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor(done[str(i)].token_ids)
        assert len(ids) == 3 + i % 4
        wanted = raw_logprobs(qwen.model, prompt, ids.tolist()).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done[str(i)].logprobs), wanted, atol=1e-5, rtol=0)


def prompts_of(one: Bench) -> tuple[int, int]:
    status = one.decoder.status(SERVING, busy_s=0.0)
    return status.prompt_tokens, status.cached_prompt_tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_counts_when_its_job_ends_and_as_cached_when_it_was_copied(qwen: Tiny, deterministic: bool) -> None:
    with bench(qwen, deterministic=deterministic, max_num_seqs=4) as one:
        one.submit(*(request_of((3, 1, 4, 1, 5), max_tokens=4, name=f"a{n}", sample=n) for n in range(3)))
        one.submit(request_of((2, 7), max_tokens=4, name="b"))
        one.steps(3)
        assert prompts_of(one) == (0, 0)
        one.finish()
        assert prompts_of(one) == (3 * 5 + 2, 2 * 4), "of five tokens the last one is never cached"
        one.submit(request_of((3, 1, 4, 1, 5), name="c"))
        one.finish()
        assert prompts_of(one) == (3 * 5 + 2 + 5, 2 * 4), "a prefix is there as long as a slot holds it"


def test_a_prompt_that_is_computed_anew_was_not_cached_and_one_that_never_was_does_not_count(qwen: Tiny) -> None:
    with bench(qwen, max_num_seqs=2) as one:
        one.submit(*(request_of((3, 1, 4, 1, 5), name=f"a{n}", sample=n) for n in range(2)), request_of((2, 7)))
        one.steps(2)
        one.load(qwen.model, 2, keep_cache=False)
        one.steps(1)
        assert len(one.cut()) == 3
        assert prompts_of(one) == (2 * 5, 0), "different tokens follow, so each was computed"
        one.submit(request_of((2, 7)))
        one.decoder.admit()
        assert len(one.cut()) == 1
        assert prompts_of(one) == (2 * 5, 0)


def test_a_stop_id_ends_the_sequence_and_is_part_of_it(qwen: Tiny) -> None:
    with bench(qwen) as one:
        one.submit(request_of((1, 2, 3), max_tokens=12))
        free = one.finish()["r"]
        stop = free.token_ids[3]
        many = (*range(100, 108), stop)
        one.submit(request_of((1, 2, 3), max_tokens=12, stop=many), request_of((1, 2, 3), max_tokens=12, name="free"))
        done = one.finish()
    assert done["r"].token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert done["r"].finish_reason == "stop"
    assert done["free"].token_ids == free.token_ids
    assert free.finish_reason == "length"


def test_a_request_is_refused_when_it_wants_newer_weights(qwen: Tiny) -> None:
    with bench(qwen) as one:
        one.submit(request_of((1,), min_version=2), request_of((1,), name="ok", min_version=1))
        (refused,) = one.decoder.admit()
        assert isinstance(refused.value, StateError)
        assert "version 2" in str(refused.value)
        assert set(one.finish()) == {"ok"}


def test_only_the_wanted_jobs_are_cut_when_ids_are_named(qwen: Tiny) -> None:
    with bench(qwen, max_num_seqs=2) as one:
        one.submit(*(request_of((i + 1,), max_tokens=6, name=str(i)) for i in range(4)))
        one.steps(2)
        cut = one.decoder.abort(lambda job: job.request.request_id in {"0", "3"}, reason="why")
        assert {(r.job.request.request_id, r.value.reason) for r in cut if isinstance(r.value, AbortedCompletion)} == {
            ("0", "why"),
            ("3", "why"),
        }
        done = one.finish()
    assert set(done) == {"1", "2"}
    assert all(len(value.token_ids) == 6 for value in done.values())


def test_one_request_fails_and_the_next_succeeds_when_weights_hold_nan(qwen: Tiny) -> None:
    with bench(qwen) as one:
        norm = next(p for name, p in one.model.named_parameters() if "norm" in name)
        norm.fill_(torch.nan)
        one.submit(request_of((1, 2, 3)))
        (bad,) = one.steps(1)
        assert isinstance(bad.value, StateError)
        assert "not finite" in str(bad.value)
        one.load(qwen.model, 2)
        one.submit(request_of((4,), max_tokens=5))
        done = one.finish()["r"]
    wanted = raw_logprobs(qwen.model, (4,), done.token_ids).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), wanted, atol=1e-5, rtol=0)


def test_the_cache_grows_when_sequences_get_long(qwen: Tiny) -> None:
    with bench(qwen, max_model_len=200) as one:
        one.submit(request_of((1, 2), max_tokens=190, name="long"), request_of((3,), max_tokens=2, name="short"))
        done = one.finish()
    ids = torch.tensor(done["long"].token_ids)
    wanted = raw_logprobs(qwen.model, (1, 2), ids.tolist()).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done["long"].logprobs), wanted, atol=1e-4, rtol=0)
