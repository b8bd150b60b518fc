from __future__ import annotations

import torch
from ckpt_transport import manifest_of
from hypothesis import given
from hypothesis import strategies as st

from verl_ckpt_engine.digest import combined_digest, payload_hasher


def digest(data: bytes) -> int:
    hasher = payload_hasher()
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


@given(data=st.binary(max_size=4000), cut=st.integers(0, 4000))
def test_digest_is_the_same_wherever_the_payload_is_cut(data: bytes, cut: int) -> None:
    hasher = payload_hasher()
    hasher.update(memoryview(data)[:cut])
    hasher.update(memoryview(data)[cut:])
    assert hasher.intdigest() == digest(data)
    assert 0 <= hasher.intdigest() < 2**64


def test_combined_digest_changes_when_tensors_are_swapped_and_not_with_the_version() -> None:
    weights = {"a": torch.zeros(3), "b": torch.ones(3)}
    manifest = manifest_of(weights, 1)
    whole = combined_digest(manifest, {"a": 1, "b": 2})
    assert combined_digest(manifest_of(weights, 2), {"a": 1, "b": 2}) == whole
    assert combined_digest(manifest, {"a": 2, "b": 1}) != whole
    assert combined_digest(manifest_of({"a": weights["a"].view(3, 1), "b": weights["b"]}, 1), {"a": 1, "b": 2}) != whole
