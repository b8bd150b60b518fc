"""None is written out, and an absent value is not a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

from verl_contracts.tokens import SamplingParams

if TYPE_CHECKING:
    from verl_contracts.rollout import ReplicaStatus


def first_rank(start_rank: int | None = None) -> int:
    return 0 if start_rank is None else start_rank


def implicit_none(start_rank: int = None) -> int:  # E: assignment
    return start_rank


def uncommitted(status: ReplicaStatus) -> int:
    assert_type(status.version, int | None)
    return status.version  # E: return-value


SamplingParams(max_tokens=None)  # E: arg-type
