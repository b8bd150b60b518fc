"""What is said of steps without a signal: the reward that is common to all samples, and no more than two lines."""

from __future__ import annotations

import pytest

from verl_trainers.core.signal import SignalWatch


@pytest.mark.parametrize(
    ("scores", "words"), [([0.0, 0.0], "every reward is 0.000"), ([0.25, 1.0], "rewards from 0.250 to 1.000")]
)
def test_the_rewards_are_named_and_the_lines_are_two(
    scores: list[float], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = SignalWatch(n=8)
    for step in range(1, 100):
        watch.see(step, scores, {"advantage/zero_groups": 1.0})
    watch.end()
    first, last = caplog.messages
    assert words in first
    assert "rollout.n=8" in first
    assert last.startswith("99 of 99 steps")
    assert watch.without == 99
