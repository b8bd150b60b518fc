"""Which weights each token of vLLM's came from, and what is never trained on: tokens of which nobody knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from verl_contracts.tokens import (
    AbortedCompletion,
    Completion,
    GenerationRequest,
    SampleKey,
    SamplingParams,
    VersionSpan,
)
from verl_rollout.engine.vllm.answers import Spans, Updates, aborted, completed

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

REQUEST = GenerationRequest(
    request_id="r", prompt_ids=(1,), sampling=SamplingParams(max_tokens=4), key=SampleKey(uid="0", sample=0, turn=0)
)


@dataclass
class Flat:
    """Log-probs as vLLM gives them."""

    logprobs: list[float]
    start_indices: list[int]


@dataclass
class Older:
    """An output of vLLM before 0.32."""

    finish_reason: str | None = "stop"
    token_ids: list[int] = field(default_factory=lambda: [5, 6, 7])
    logprobs: Flat = field(default_factory=lambda: Flat([-0.1, -0.2, -0.3], [0, 1, 2]))


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Newer(Older):
    weight_versions: list[Span] | None = None


def output(made: Older) -> CompletionOutput:
    return cast("CompletionOutput", made)


def committed(*versions: int) -> Updates:
    updates = Updates()
    for version in versions:
        updates.commit(version, keep_cache=False)
    return updates


def test_a_cache_is_as_old_as_the_last_time_that_it_was_computed() -> None:
    updates = Updates()
    for version, keep in ((1, False), (2, True), (3, False), (4, True), (5, True)):
        updates.commit(version, keep_cache=keep)
    assert [updates.kv_version(version, 1) for version in (1, 2, 3, 4, 5)] == [1, 1, 3, 3, 3]
    assert [updates.kv_version(version, 2) for version in (2, 3, 4)] == [2, 3, 3]
    assert updates.kv_version(5, 5) == 5


@pytest.mark.parametrize("made", [Older(), Newer()])
def test_a_vllm_that_tells_nothing_is_answered_for_while_no_update_was_made(made: Older) -> None:
    reply = completed(output(made), REQUEST, Spans(committed(3), 3), replica="a")
    assert isinstance(reply, Completion)
    assert (reply.token_ids, reply.logprobs) == ((5, 6, 7), (-0.1, -0.2, -0.3))
    assert reply.spans == (VersionSpan(version=3, kv_version=3, start=0, end=3),)


@pytest.mark.parametrize("made", [Older(), Newer()])
def test_a_finished_answer_that_an_update_overtook_is_asked_for_again_when_vllm_tells_nothing(made: Older) -> None:
    spans = Spans(committed(3, 4), 3)
    for reply in (
        completed(output(made), REQUEST, spans, replica="a"),
        aborted(output(made), REQUEST, spans, replica="a", reason="cut"),
    ):
        assert isinstance(reply, AbortedCompletion)
        assert (reply.token_ids, reply.logprobs, reply.spans) == ((), (), ())


def test_what_vllm_tells_is_taken() -> None:
    made = Newer(weight_versions=[Span("3", 0, 2), Span("4", 2, 3)])
    reply = completed(output(made), REQUEST, Spans(committed(3, 4), 3), replica="a")
    assert isinstance(reply, Completion)
    assert reply.spans == (
        VersionSpan(version=3, kv_version=3, start=0, end=2),
        VersionSpan(version=4, kv_version=4, start=2, end=3),
    )
