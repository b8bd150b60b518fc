"""What the dataclasses refuse: lengths that differ, uncovered tokens, scores that are none, short batches."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from verl_contracts.rewards import RewardResult
from verl_contracts.runtime import Bundle, DeviceGrant, PayloadRef
from verl_contracts.samples import FAILED, SCORED, GroupResult, GroupUid, Outcome, SampleResult, Trajectory
from verl_contracts.tokens import SAMPLED, SamplingParams, VersionSpan
from verl_contracts.tracking import Metric, reduce_metrics
from verl_contracts.training import Schedule, TrainBatch, TrainRow

PAYLOAD = PayloadRef(num_bytes=0, value=())


def _span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, kv_version=version, start=start, end=end)


def _trajectory(*spans: VersionSpan, mask: tuple[int, ...] = (0, 0, 1, 1, 1)) -> Trajectory:
    return Trajectory(
        ids=(1, 2, 3, 4, 5),
        loss_mask=mask,
        logprobs=(0.0, 0.0, -0.5, -0.5, -0.5),
        spans=spans,
        logprob_kind=SAMPLED,
        prompt_length=2,
    )


def test_trajectory_knows_its_versions_by_trained_tokens() -> None:
    trajectory = _trajectory(_span(3, 2, 4), _span(5, 4, 5))
    assert (trajectory.num_trained, trajectory.versions()) == (3, (3, 5))
    masked = _trajectory(_span(3, 2, 4), _span(5, 4, 5), mask=(0, 0, 0, 0, 1))
    assert masked.versions() == (5, 5), "a token that is not trained has no staleness"
    assert _trajectory(mask=(0,) * 5).versions() is None


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ((), "3 trained tokens lie in no version span"),
        ((_span(1, 2, 4),), "1 trained tokens lie in no version span"),
        ((_span(1, 2, 4), _span(2, 3, 5)), "disjoint, in order"),
        ((_span(1, 4, 5), _span(2, 2, 4)), "disjoint, in order"),
        ((_span(1, 2, 6),), "within 0..5"),
        ((_span(1, 3, 2),), "disjoint, in order"),
    ],
)
def test_trajectory_refuses_spans_that_do_not_cover(spans: tuple[VersionSpan, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _trajectory(*spans)


@pytest.mark.parametrize("field", ["loss_mask", "logprobs"])
def test_trajectory_refuses_two_lengths(field: str) -> None:
    with pytest.raises(ValueError, match="one length expected: 5 ids"):
        replace(_trajectory(_span(1, 2, 5)), **{field: (0,) * 4})  # type: ignore[arg-type]


def test_uid_goes_through_text_and_sorts_by_number() -> None:
    uids = [GroupUid(epoch=0, row=9), GroupUid(epoch=0, row=10, attempt=2), GroupUid(epoch=-1, row=3)]
    assert [GroupUid.parse(str(uid)) for uid in uids] == uids
    assert sorted(uids)[1:] == uids[:2]
    for text in ("", "1-2", "a-b-c", "1-2-x"):
        with pytest.raises(ValueError, match=r".*"):
            GroupUid.parse(text)


def test_group_refuses_missing_or_shuffled_samples() -> None:
    def sample(index: int) -> SampleResult:
        return SampleResult(index=index, outcome=FAILED)

    for indices in ((1,), (0, 2), (1, 0), (0, 0)):
        with pytest.raises(ValueError, match=r"indices must be 0\.\.n-1"):
            GroupResult(uid=GroupUid(epoch=0, row=1), samples=tuple(sample(i) for i in indices))


def test_group_counts_only_what_can_be_trained() -> None:
    group = GroupResult(
        uid=GroupUid(epoch=0, row=1),
        samples=(
            SampleResult(index=0, outcome=SCORED, score=0.0, payload=PAYLOAD, versions=(4, 6)),
            SampleResult(index=1, outcome=FAILED, versions=(2, 2)),
            SampleResult(index=2, outcome=SCORED, score=1.0, payload=None),
        ),
    )
    assert [sample.index for sample in group.scored] == [0]
    assert group.oldest_version == 2
    assert GroupResult(uid=group.uid, samples=()).oldest_version is None


@pytest.mark.parametrize(
    ("outcome", "score"),
    [(SCORED, None), (FAILED, 0.0), (SCORED, float("nan")), (SCORED, float("inf")), (SCORED, 1e39), (SCORED, -1e39)],
)
def test_reward_refuses_a_failure_with_a_score_and_a_score_that_is_none(outcome: str, score: float | None) -> None:
    with pytest.raises(ValueError, match="score"):
        RewardResult(outcome=Outcome(outcome), score=score)


def test_batch_refuses_fewer_rows_than_promised_unless_said() -> None:
    row = TrainRow(uid="0-0-0", sample=0, score=1.0, payload=PAYLOAD, num_tokens=5, num_trained=3)
    with pytest.raises(ValueError, match="promises 2 rows and has 1"):
        TrainBatch(rows=(row,), num_groups=1, expected_rows=2)
    TrainBatch(rows=(row,), num_groups=1, expected_rows=2, allow_fewer=True)
    with pytest.raises(ValueError, match="promises 1 rows and has 2"):
        TrainBatch(rows=(row, row), num_groups=1, expected_rows=1, allow_fewer=True)


def test_schedule_refuses_weights_that_move_too_seldom() -> None:
    assert Schedule(max_staleness=2, sync_every=3).sync_every == 3
    with pytest.raises(ValueError, match=r"\(4 - 1 > 2\)"):
        Schedule(max_staleness=2, sync_every=4)
    for wrong in ({"max_staleness": -1}, {"max_staleness": 0, "sync_every": 0}):
        with pytest.raises(ValueError, match="must be ≥"):
            Schedule(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": -0.1}, {"top_k": 0}]
)
def test_sampling_refuses_what_no_engine_can_do(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        SamplingParams(**{"max_tokens": 4, **wrong})  # type: ignore[arg-type]


def test_metrics_are_combined_as_each_says() -> None:
    rows = [
        Metric(name=f"x/{way}", value=value, reduce=way)
        for value in (3.0, 1.0, 2.0)
        for way in ("mean", "sum", "max", "min", "last")
    ]
    assert reduce_metrics(rows) == {"x/mean": 2.0, "x/sum": 6.0, "x/max": 3.0, "x/min": 1.0, "x/last": 2.0}
    assert reduce_metrics([]) == {}


def test_metrics_of_one_name_must_agree_on_the_way() -> None:
    with pytest.raises(ValueError, match=r"'loss' is reduced in several ways: \['max', 'mean'\]"):
        reduce_metrics([Metric(name="loss", value=1.0), Metric(name="loss", value=1.0, reduce="max")])


def test_grant_is_shared_without_changing_the_original() -> None:
    grant = DeviceGrant(pool="p", bundles=(Bundle(), Bundle(gpus=1.0)), token="t")
    assert (grant.shared(0.5).share, grant.share, grant.shared(0.5).token) == (0.5, 1.0, "t")


def test_data_travels_between_processes() -> None:
    trajectory = _trajectory(_span(3, 2, 5))
    group = GroupResult(
        uid=GroupUid(epoch=0, row=1),
        samples=(
            SampleResult(index=0, outcome=SCORED, score=1.0, payload=PayloadRef(num_bytes=0, value=(trajectory,))),
        ),
    )
    assert pickle.loads(pickle.dumps(group)) == group
