"""What ranks report of a transfer is compared with its manifest and with each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_ckpt_engine.comparing import check_received, check_sent
from verl_contracts.errors import WeightSyncError
from verl_contracts.weights import Manifest, TensorMeta, TransferReport

MANIFEST = Manifest(
    version=3, tensors=tuple(TensorMeta(name=name, shape=(2,), dtype="float32") for name in "ab"), num_bytes=16
)
FULL = TransferReport(owner="trainer", rank=0, tensors=2, num_bytes=16, seconds=0.1, digests={"a": 1, "b": 2})
NOTHING = TransferReport(owner="trainer", rank=1, tensors=0, num_bytes=0, seconds=0.1, digests={})
EMPTY = Manifest(version=3, tensors=(), num_bytes=0)


@pytest.mark.parametrize("reports", [[FULL], [FULL, NOTHING], [NOTHING, FULL], [FULL, replace(FULL, rank=1)]])
def test_ranks_that_sent_agree_and_others_need_not(reports: list[TransferReport]) -> None:
    assert check_sent(MANIFEST, reports) == {"a": 1, "b": 2}


def test_of_nothing_nothing_is_sent() -> None:
    assert check_sent(EMPTY, [replace(NOTHING, rank=0)]) == {}


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([], "no sender rank reports that it sent anything"),
        ([NOTHING], "no sender rank reports"),
        ([replace(FULL, tensors=1, digests={"a": 1})], "rank 0 reports 1 of 2 tensors, 16 of 16 bytes; not sent: b"),
        ([replace(FULL, num_bytes=15)], "15 of 16 bytes"),
        ([FULL, replace(FULL, rank=4, digests={"a": 1, "b": 3})], "ranks 0 and 4 sent different weights; differing: b"),
    ],
)
def test_a_sender_that_contradicts_is_refused(reports: list[TransferReport], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_sent(MANIFEST, reports)


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([FULL], "1 of 2 ranks reported"),
        ([FULL, replace(FULL, rank=1, digests={"a": 9, "b": 2})], "rank 1 has 2 of 2 tensors.*; not as sent: a"),
        ([FULL, replace(FULL, rank=1, num_bytes=8)], "rank 1 has 2 of 2 tensors, 8 of 16 bytes"),
    ],
)
def test_a_rank_that_has_something_else_is_refused(reports: list[TransferReport], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        check_received(MANIFEST, FULL.digests, reports, ranks=2)
    check_received(MANIFEST, FULL.digests, [FULL, replace(FULL, rank=1)], ranks=2)
