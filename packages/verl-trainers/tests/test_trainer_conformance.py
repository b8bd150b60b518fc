"""The kit's suites against what this package brings."""

from __future__ import annotations

from collections.abc import Sequence

from verl_contracts.rewards import RewardRequest
from verl_contracts.testing.suites.admission import AdmissionPolicySuite
from verl_contracts.testing.suites.rewards import RewardFunctionSuite
from verl_contracts.testing.suites.store import ExperienceStoreSuite
from verl_contracts.testing.suites.training import AdvantageEstimatorSuite, PolicyLossSuite
from verl_trainers.advantages.grpo import GroupRelative
from verl_trainers.core.admission import BoundedAdmission
from verl_trainers.core.store import GroupStore
from verl_trainers.losses.ppo_clip import PpoClip
from verl_trainers.rewards.builtin import CopyReward, LastNumber


class TestBoundedAdmission(AdmissionPolicySuite):
    def policy(self, *, max_staleness: int, batch_groups: int) -> BoundedAdmission:
        return BoundedAdmission(max_staleness=max_staleness, batch_groups=batch_groups, total_steps=1000)


class TestGroupStore(ExperienceStoreSuite):
    def store(self) -> GroupStore:
        return GroupStore()


class TestGroupRelative(AdvantageEstimatorSuite):
    def estimator(self) -> GroupRelative:
        return GroupRelative(norm_by_std=False)


class TestGroupRelativeByDeviation(AdvantageEstimatorSuite):
    def estimator(self) -> GroupRelative:
        return GroupRelative(norm_by_std=True)


class TestPpoClip(PolicyLossSuite):
    def loss(self) -> PpoClip:
        return PpoClip()


def request(truth: str) -> RewardRequest:
    return RewardRequest(uid="0-0-0", sample=0, data_source="toy", response_ids=(1, 2), ground_truth=truth)


class TestLastNumber(RewardFunctionSuite):
    def function(self) -> LastNumber:
        return LastNumber()

    def cases(self) -> Sequence[tuple[RewardRequest, str, float]]:
        return (
            (request("7"), "3 + 4 is 7.", 1.0),
            (request("7"), "I think 8", 0.0),
            (request("7"), "no idea", 0.0),
        )


class TestCopyReward(RewardFunctionSuite):
    def function(self) -> CopyReward:
        return CopyReward()

    def cases(self) -> Sequence[tuple[RewardRequest, str, float]]:
        return ((request("3 3 3 3"), "3 3 3 3", 1.0), (request("3 3 3 3"), "3 3 4 4", 0.6))
