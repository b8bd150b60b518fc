"""Two rewards that need nothing but the answer: enough for the recipes, and examples of the contract."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from verl_contracts.rewards import RewardResult
from verl_contracts.samples import SCORED

if TYPE_CHECKING:
    from verl_contracts.rewards import RewardFunction, RewardRequest

__all__ = ["CopyReward", "LastNumber"]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class CopyReward:
    """Share of right positions, the end of the sequence counting as one more.

    Words are compared with those of the ground truth one by one; the end is right when the answer ends by itself after
    exactly as many words.
    """

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        """Judge one answer. Raises ValueError when the row has no ground truth."""
        truth = str(request.ground_truth or "").split()
        if not truth:
            raise ValueError("the row has no reward_model.ground_truth to compare with")
        words = response.split()
        right = sum(word == wanted for word, wanted in zip(words, truth, strict=False))
        ended = len(words) == len(truth) and not request.truncated
        exact = float(words == truth and ended)
        return RewardResult(outcome=SCORED, score=(right + ended) / (len(truth) + 1), metrics={"exact": exact})


class LastNumber:
    """1 when the last number in the answer equals the ground truth, else 0."""

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        """Judge one answer. Raises ValueError when the ground truth is not a number."""
        wanted = float(str(request.ground_truth))
        numbers = _NUMBER.findall(response)
        right = bool(numbers) and float(numbers[-1].replace(",", "")) == wanted
        return RewardResult(outcome=SCORED, score=float(right), metrics={"answered": float(bool(numbers))})


if TYPE_CHECKING:

    def _is_copy(x: CopyReward) -> RewardFunction:
        return x

    def _is_last_number(x: LastNumber) -> RewardFunction:
        return x
