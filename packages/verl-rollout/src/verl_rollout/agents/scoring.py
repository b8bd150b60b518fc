"""From what an agent loop played to what the driver is told: numbers, outcome, and the request for a verdict. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from verl_contracts.rewards import RewardRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.samples import GroupRequest, Trajectory

__all__ = ["num_turns", "oldest_and_newest", "reward_request"]


def reward_request(request: GroupRequest, sample: int, trajectories: Sequence[Trajectory]) -> RewardRequest:
    """Return what a reward is asked about: the sampled ids of the last trajectory."""
    last = trajectories[-1]
    return RewardRequest(
        uid=str(request.uid),
        sample=sample,
        data_source=request.prompt.data_source,
        response_ids=tuple(itertools.compress(last.ids, last.loss_mask)),
        ground_truth=request.prompt.ground_truth,
        extra_info=request.prompt.extra_info,
        truncated=last.truncated,
    )


def oldest_and_newest(trajectories: Sequence[Trajectory]) -> tuple[int, int] | None:
    """Return the oldest and newest version among the trained tokens of all; None when none is trained."""
    found = [versions for trajectory in trajectories if (versions := trajectory.versions()) is not None]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def num_turns(trajectories: Sequence[Trajectory]) -> int:
    """Return how many stretches of sampled tokens there are."""
    masks = [bytes(trajectory.loss_mask) for trajectory in trajectories]
    return sum(mask.count(b"\x00\x01") + mask.startswith(b"\x01") for mask in masks)
