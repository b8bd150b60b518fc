"""Parts that need no process: what a death is called, what fits where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_contracts.failures import MAX_LINES
from verl_contracts.runtime import ActorRef, Bundle, PlacementRequest
from verl_runtime.pools import Free, fits
from verl_runtime.ray.autopsy import LAST_WORDS, describe_death

_ACTOR = ActorRef(name="r/replica/2.1", role="replica", rank=2)


@pytest.mark.parametrize(
    ("said", "lines", "oom", "cause"),
    [
        ("worker process has died", (f"{LAST_WORDS}SystemExit: 1",), 0, "SystemExit: 1"),
        ("worker process has died", (f"{LAST_WORDS}SystemExit: 1",), 3, "SystemExit: 1"),
        ("worker process has died", ("a", "Fatal Python error: Aborted", "b"), 0, "Fatal Python error: Aborted"),
        ("worker process has died", (), 1, "killed by signal 9; the kernel killed processes because memory ran out"),
        ("Task was killed due to the node running low on memory.", (), 0, "killed by Ray because memory ran out"),
        ("because its placement group was removed", (), 0, "its pool was released while it ran"),
        ("its owner's node has died", (), 0, "its node died"),
        ("something\nnew", (), 0, "gone: RuntimeError: something"),
    ],
)
def test_death_is_called_by_its_first_cause(said: str, lines: tuple[str, ...], oom: int, cause: str) -> None:
    record = describe_death(_ACTOR, RuntimeError(said), lines=lines, oom_kills_since=oom)
    assert (record.role, record.rank) == ("replica", 2)
    assert record.cause.startswith(cause)
    assert "\n" not in record.cause
    assert ("smaller" in record.cause) is ("memory" in cause), "a hint when memory ran out"


@pytest.mark.parametrize("after", [0, 10, 200])
def test_the_lines_kept_hold_the_cause_and_are_at_most_30(after: int) -> None:
    lines = (*("before",) * 50, "Fatal Python error: Aborted", *("stack",) * after)
    record = describe_death(_ACTOR, RuntimeError("died"), lines=lines, oom_kills_since=0)
    assert len(record.lines) == MAX_LINES
    assert "Fatal Python error: Aborted" in record.lines


@pytest.mark.parametrize(
    ("strategy", "free", "expected"),
    [
        ("strict_pack", [1, 1], False),
        ("strict_pack", [1, 2], True),
        ("pack", [1, 1], True),
        ("spread", [2], True),
        ("pack", [1.5, 0.5], False),
    ],
)
def test_two_cpus_fit_as_the_strategy_says(strategy: str, free: list[float], expected: bool) -> None:
    request = PlacementRequest(
        pool="p",
        bundles=(Bundle(), Bundle()),
        strategy=strategy,  # type: ignore[arg-type]
    )
    nodes = {f"node{index}": Free(cpus=cpus, gpus=0.0) for index, cpus in enumerate(free)}
    assert fits(request, nodes) is expected


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_nothing_fits_that_is_larger_than_the_sum_of_its_nodes(wanted: list[int], free: list[int]) -> None:
    request = PlacementRequest(pool="p", bundles=tuple(Bundle(cpus=float(cpus)) for cpus in wanted))
    nodes = {f"node{index}": Free(cpus=float(cpus), gpus=0.0) for index, cpus in enumerate(free)}
    if sum(wanted) > sum(free) or max(wanted) > max(free):
        assert not fits(request, nodes)
    if len(wanted) == 1 and max(wanted) <= max(free):
        assert fits(request, nodes)
