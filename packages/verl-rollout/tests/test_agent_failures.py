"""What is told of a loop that raises: its own line, whatever it called, and a log that cannot be flooded."""

from __future__ import annotations

import json
import logging

import pytest

from verl_contracts.errors import WaitTimeout
from verl_contracts.failures import FailureRecord
from verl_rollout.agents.failures import FailureLog, describe


def parse(text: str) -> object:
    return json.loads(text)


PARSE = f"{__file__}:{parse.__code__.co_firstlineno + 1} in parse"


def cause_of(exc: Exception) -> str:
    return describe(exc, role="agent", rank=0).cause


def test_the_place_is_the_users_line_and_not_the_librarys() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        parse("{")
    assert cause_of(caught.value).endswith(f"({PARSE})")


def test_the_place_is_that_of_the_first_cause() -> None:
    def convert() -> None:
        try:
            parse("{")
        except ValueError as exc:
            raise RuntimeError("no call in the answer") from exc

    with pytest.raises(RuntimeError) as caught:
        convert()
    cause = cause_of(caught.value)
    assert cause.startswith("JSONDecodeError")
    assert cause.endswith(f"({PARSE})")


def test_only_so_many_distinct_causes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(1000):
        log.note(f"sample {number}", "failed", FailureRecord(role="agent", rank=0, node="here", cause=f"E: {number}"))
    assert len(caplog.messages) == 10
    caplog.clear()
    caplog.set_level(logging.INFO)
    log.close()
    assert caplog.messages == ["990 more samples ended for other causes"]


def test_timeouts_are_one_cause_whatever_was_awaited(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(20):
        record = describe(WaitTimeout(f"sample {number}", "agent[0]", 5.0), role="agent", rank=0)
        log.note(f"sample {number}", "timed_out", record)
    assert len(caplog.messages) == 1
