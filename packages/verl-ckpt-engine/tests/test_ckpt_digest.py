from __future__ import annotations

import random
from itertools import pairwise
from typing import get_args

import torch
from ckpt_transport import manifest_of
from hypothesis import given
from hypothesis import strategies as st

from verl_ckpt_engine.digest import STRETCH, WINDOW, combined_digest, payload_hasher
from verl_contracts.weights import Verification


def digest(data: bytes, verification: Verification = "full") -> int:
    hasher = payload_hasher(len(data), verification)
    hasher.update(memoryview(data))
    return hasher.intdigest()


@given(data=st.binary(min_size=1, max_size=4000), position=st.integers(0, 3999), bit=st.integers(0, 7))
def test_digest_changes_when_one_bit_flips(data: bytes, position: int, bit: int) -> None:
    changed = bytearray(data)
    changed[position % len(data)] ^= 1 << bit
    assert digest(bytes(changed)) != digest(data)


def test_digest_changes_when_elements_are_swapped_that_differ_in_sign_only() -> None:
    # A weighted sum modulo 2**64 cannot tell these apart: the difference is the top bit of a word.
    one = torch.tensor([0.0, 1.0, 0.0, -1.0], dtype=torch.float64).numpy().tobytes()
    other = torch.tensor([0.0, -1.0, 0.0, 1.0], dtype=torch.float64).numpy().tobytes()
    assert digest(one) != digest(other)


@given(
    size=st.sampled_from([0, 1, WINDOW, STRETCH, STRETCH + 1, 3 * STRETCH, 3 * STRETCH + WINDOW + 5]),
    cuts=st.lists(st.integers(0, 4 * STRETCH), max_size=6),
    verification=st.sampled_from(get_args(Verification)),
)
def test_digest_is_the_same_wherever_the_payload_is_cut(size: int, cuts: list[int], verification: Verification) -> None:
    data = random.Random(size).randbytes(size)
    hasher = payload_hasher(size, verification)
    places = sorted({0, size, *(cut for cut in cuts if cut < size)})
    for start, stop in pairwise(places):
        hasher.update(memoryview(data)[start:stop])
    assert hasher.intdigest() == digest(data, verification)
    assert 0 <= hasher.intdigest() < 2**64


def test_sampled_digest_reads_a_window_of_each_stretch_and_the_end() -> None:
    size = 3 * STRETCH + STRETCH // 2
    data = random.Random(7).randbytes(size)

    def noticed(position: int) -> bool:
        changed = bytearray(data)
        changed[position] ^= 1
        return digest(bytes(changed), "sampled") != digest(data, "sampled")

    assert all(noticed(start + at) for start in range(0, size, STRETCH) for at in (0, WINDOW - 1))
    assert all(noticed(at) for at in (size - WINDOW, size - 1))
    assert not noticed(WINDOW)
    assert digest(data[1:] + data[:1], "sampled") != digest(data, "sampled")
    assert digest(data[:STRETCH], "sampled") == digest(data[:STRETCH]), "a small one is read in full"


def test_combined_digest_changes_when_tensors_are_swapped_and_not_with_the_version() -> None:
    weights = {"a": torch.zeros(3), "b": torch.ones(3)}
    manifest = manifest_of(weights, 1)
    whole = combined_digest(manifest, {"a": 1, "b": 2})
    assert combined_digest(manifest_of(weights, 2), {"a": 1, "b": 2}) == whole
    assert combined_digest(manifest, {"a": 2, "b": 1}) != whole
    assert combined_digest(manifest_of({"a": weights["a"].view(3, 1), "b": weights["b"]}, 1), {"a": 1, "b": 2}) != whole
