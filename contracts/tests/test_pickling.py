"""Dataclasses that cross processes come back equal, whatever is in them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

import pytest

from verl_contracts.pickling import cheap_pickle
from verl_contracts.rewards import RewardResult
from verl_contracts.runtime import ActorRef, PayloadRef
from verl_contracts.samples import SCORED, GroupUid, SampleResult, Trajectory
from verl_contracts.tokens import SAMPLED, GenerationRequest, SampleKey, SamplingParams, VersionSpan
from verl_contracts.training import TrainBatch, TrainRow

SPAN = VersionSpan(version=3, kv_version=2, start=1, end=3)
ROW = TrainRow(uid="0-1-0", sample=0, score=0.5, payload=PayloadRef(num_bytes=0), num_tokens=3, num_trained=2)
VALUES = [
    GroupUid(epoch=-3, row=7, attempt=1),
    SPAN,
    GenerationRequest(
        request_id="a",
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_tokens=3, stop_token_ids=(9,)),
        key=SampleKey(uid="0-1-0", sample=2, turn=0),
    ),
    Trajectory(
        ids=(1, 2, 3),
        loss_mask=(0, 1, 1),
        logprobs=(0.0, -0.5, -1.5),
        spans=(SPAN,),
        logprob_kind=SAMPLED,
        prompt_length=1,
    ),
    SampleResult(index=0, outcome=SCORED, score=1.0, payload=PayloadRef(num_bytes=2, value=b"ab"), versions=(1, 2)),
    RewardResult(outcome=SCORED, score=0.25, metrics={"exact": 0.0}),
    TrainBatch(rows=(ROW,), num_groups=1, expected_rows=1),
    ActorRef(name="run/replica/0", role="replica", rank=0, token=("a", 1)),
]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_equal(value: object, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(value, protocol))
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)


def test_a_restored_value_is_frozen_and_can_be_replaced() -> None:
    again = pickle.loads(pickle.dumps(SPAN))
    with pytest.raises(AttributeError):
        again.start = 5
    assert replace(again, end=9) == VersionSpan(version=3, kv_version=2, start=1, end=9)


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    value: int


def test_a_class_with_one_field_comes_back_equal() -> None:
    assert pickle.loads(pickle.dumps(Single(value=4))) == Single(value=4)
