from __future__ import annotations

import pytest
import torch
from ckpt_transport import DTYPES, DictSource, DictTarget, Transfer, check_equal, held, named, sample_weights
from hypothesis import given, settings
from hypothesis import strategies as st

KIB = 1024


@pytest.mark.parametrize("bucket_bytes", [1, KIB, 4 * KIB, 64 * KIB, KIB * KIB, 64 * KIB * KIB])
@pytest.mark.parametrize("receivers", [1, 3])
def test_all_kinds_of_tensors_arrive_for_any_bucket(bucket_bytes: int, receivers: int) -> None:
    weights = sample_weights()
    with Transfer(DictSource(weights), receivers=receivers, bucket_bytes=bucket_bytes) as transfer:
        targets = [DictTarget() for _ in range(receivers)]
        received = [transfer.receive(target, index) for index, target in enumerate(targets)]
        sent = transfer.send().result(20)
        for target, report in zip(targets, received, strict=True):
            check_equal(target.weights, weights)
            assert report.result(20).digests == sent.digests
            assert report.result().tensors == len(weights)
            assert report.result().num_bytes == sent.num_bytes == transfer.plan.manifest.num_bytes
        assert named() == []


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=12),
    bucket_bytes=st.integers(1, 5000),
    receivers=st.integers(1, 4),
)
def test_any_list_of_tensors_arrives(
    tensors: list[tuple[tuple[int, ...], torch.dtype, bool]], bucket_bytes: int, receivers: int
) -> None:
    weights = {}
    for index, (shape, dtype, strided) in enumerate(tensors):
        tensor = torch.randint(0, 2, shape).to(dtype)
        weights[f"t{index}"] = tensor.t() if strided and tensor.dim() == 2 else tensor
    with Transfer(DictSource(weights), receivers=receivers, bucket_bytes=bucket_bytes) as transfer:
        targets = [DictTarget() for _ in range(receivers)]
        received = [transfer.receive(target, index) for index, target in enumerate(targets)]
        transfer.send().result(20)
        for target, report in zip(targets, received, strict=True):
            report.result(20)
            check_equal(target.weights, weights)


def test_memory_is_gone_when_receivers_never_came() -> None:
    before = held()
    transfer = Transfer(DictSource(sample_weights()))
    assert held() == before + 2  # a ring and a page
    transfer.close()
    transfer.close()
    del transfer
    assert held() == before


def test_skipped_names_are_reported() -> None:
    weights = {"a": torch.ones(3), "lm_head": torch.ones(3)}
    with Transfer(DictSource(weights)) as transfer:
        received = transfer.receive(DictTarget(skip=["lm_head"]))
        transfer.send().result(20)
        assert received.result(20).skipped == ("lm_head",)
