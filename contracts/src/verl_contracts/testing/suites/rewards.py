# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of a `RewardFunction`: plain, repeatable verdicts, and no answer that brings it down."""

from __future__ import annotations

import abc
import math
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_contracts.plugins import check_plugin, families
from verl_contracts.rewards import RewardResult
from verl_contracts.testing.suites.base import ContractSuite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.rewards import RewardFunction, RewardRequest

__all__ = ["RewardFunctionSuite"]

_ODD = ("", " ", "\n\n", "\0", "ünïcödé 🙂", "9" * 5000, "(((((", "1/0", "\\boxed{", "-", "None")


class RewardFunctionSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `function` and `cases`."""

    @abc.abstractmethod
    def function(self) -> RewardFunction:
        """Return a function."""

    @abc.abstractmethod
    def cases(self) -> Sequence[tuple[RewardRequest, str, float]]:
        """Return requests, responses and the scores that are right; at least two different scores."""

    def test_class_meets_the_contract(self) -> None:
        check_plugin(families.REWARD_FUNCTION, type(self.function()), key="reward.name")

    def test_known_answers_get_their_scores(self) -> None:
        function, cases = self.function(), self.cases()
        assert len({score for _, _, score in cases}) >= 2, "one score for everything would test nothing"
        for request, response, score in cases:
            result = function.score(request, response)
            assert isinstance(result, RewardResult)
            assert result.outcome == "scored"
            assert result.score is not None
            assert math.isclose(result.score, score, abs_tol=1e-9), f"{response!r} got {result.score}"

    def test_verdict_does_not_depend_on_what_was_judged_before(self) -> None:
        function = self.function()
        first = [function.score(request, response) for request, response, _ in self.cases()]
        again = [function.score(request, response) for request, response, _ in reversed(self.cases())]
        fresh = [self.function().score(request, response) for request, response, _ in self.cases()]
        assert first == again[::-1] == fresh

    def test_request_is_not_changed(self) -> None:
        for request, response, _ in self.cases():
            before = pickle.dumps(request)
            self.function().score(request, response)
            assert pickle.dumps(request) == before

    def test_odd_responses_get_a_verdict(self) -> None:
        function = self.function()
        request = self.cases()[0][0]
        for response in _ODD:
            for truncated in (False, True):
                asked = replace(request, response_ids=() if not response else (1,), truncated=truncated)
                assert isinstance(function.score(asked, response), RewardResult)

    def test_verdicts_travel_between_processes(self) -> None:
        request, response, _ = self.cases()[0]
        result = self.function().score(request, response)
        assert pickle.loads(pickle.dumps(result)) == result
