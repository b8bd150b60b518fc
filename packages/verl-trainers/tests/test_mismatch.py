"""What is said of log-probs that are too far apart: one line, with the numbers and the likely causes."""

from __future__ import annotations

import math

import pytest

from verl_trainers.core.mismatch import MismatchWatch

SAME, ANY = "rollout/logprob_diff_same_version", "rollout/logprob_diff"


def test_the_first_step_above_the_limit_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = MismatchWatch(limit=0.2)
    for step, diff in enumerate([0.04, 0.2, 0.7, 0.9, 0.1], start=1):
        watch.see(step, {SAME: diff, ANY: 3.0})
    (line,) = caplog.messages
    assert line.startswith("step 3: ")
    for words in ("differ by 0.7 nats", "logprob_diff_limit is 0.2", "rollout.dtype", "weights arrive", "temperature"):
        assert words in line


def test_stale_tokens_alone_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = MismatchWatch(limit=0.01)
    for step in range(1, 4):
        watch.see(step, {ANY: 5.0})
    assert caplog.messages == []


def test_a_difference_that_is_no_number_is_above_any_limit(caplog: pytest.LogCaptureFixture) -> None:
    MismatchWatch(limit=math.inf).see(1, {SAME: math.nan})
    assert len(caplog.messages) == 1
