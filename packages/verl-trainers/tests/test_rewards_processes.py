"""Reward processes: hanging, raising, dying and forking functions, each under a hard limit."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import RewardError, WaitTimeout
from verl_contracts.failures import FailureRecord
from verl_contracts.rewards import RewardRequest
from verl_contracts.runtime import ActorContext
from verl_contracts.samples import FAILED, SCORED, TIMED_OUT
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_trainers.rewards.client import ProcessRewardClient
from verl_trainers.rewards.probe import RewardProbe
from verl_trainers.rewards.wire import Setup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.timeout(60)

CLOCK = SystemClock()
FUNCTION = """
import os, re, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("printing is harmless")
    what = extra_info.get("do")
    if what == "busy":
        while True:
            pass
    if what == "regex":
        re.match(r"(a+)+$", "a" * 64 + "b")
    if what == "sleep":
        time.sleep(3600)
    if what == "raise":
        raise KeyError("no answer")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os._exit(7)
    if what == "nan":
        return float("nan")
    if what == "huge":
        return 1e39
    if what == "text":
        return "right"
    if what == "fork":
        os.fork()
    if what == "fork_and_hang":
        child = subprocess.Popen(["sleep", "3600"])
        with open(ground_truth, "w") as file:
            file.write(str(child.pid))
        time.sleep(3600)
    if what.startswith("bare"):
        script = 'env -i setsid sleep 3600 & echo $! > "$0"'
        subprocess.run(["sh", "-c", script, ground_truth], check=True)
    if what == "bare_and_die":
        os._exit(7)
    if what == "bare_and_hang":
        time.sleep(3600)
    if what == "half":
        raise BaseException("a\\nb\\ud800")
    if what in ("session", "session_and_hang"):
        code = "import os; os.fork() and os._exit(0); os.setsid(); os.execlp('sleep', 'sleep', '3600')"
        os.environ["WHERE"] = ground_truth
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True).wait()
        with open(ground_truth, "w") as file:
            file.write(ground_truth)
    if what == "session_and_hang":
        time.sleep(3600)
    return {"score": 1.0 if solution_str == ground_truth else 0.0, "length": len(solution_str)}
"""
WORDS = ["yes", "no", "<eos>"]


class _Sink:
    def report(self, record: FailureRecord, /) -> None:
        raise AssertionError(f"nothing to report: {record}")


@pytest.fixture
async def make_client(tmp_path: Path) -> AsyncIterator[Callable[..., ProcessRewardClient]]:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="no"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "reward.py").write_text(textwrap.dedent(FUNCTION))
    runtime = InProcessRuntime.__new__(InProcessRuntime)  # a client calls nobody
    context = ActorContext(run_id="t", role="agent", rank=0, caller=runtime, clock=CLOCK, failures=_Sink())
    made: list[ProcessRewardClient] = []

    def make(*, limit_s: float = 5.0, num_processes: int = 1, name: str = "compute_score") -> ProcessRewardClient:
        client = ProcessRewardClient(
            context=context,
            function="verl_trainers.rewards.verl_function:VerlFunction",
            options={"path": str(tmp_path / "reward.py"), "name": name},
            key="reward.custom_reward_function",
            tokenizer_path=str(tmp_path),
            limit_s=limit_s,
            num_processes=num_processes,
        )
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


def request(do: str = "", *, truth: str = "yes", ids: tuple[int, ...] = (0, 2), sample: int = 0) -> RewardRequest:
    return RewardRequest(
        uid="0-0-0", sample=sample, data_source="t", response_ids=ids, ground_truth=truth, extra_info={"do": do}
    )


def deadline(seconds: float = 30.0) -> Deadline:
    return Deadline.after(CLOCK, seconds)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110  processes tell no event
            await asyncio.sleep(0.01)


async def test_score_when_the_answer_is_right(make_client: Callable[..., ProcessRewardClient]) -> None:
    client = make_client()
    right, wrong = await asyncio.gather(
        client.score(request(), deadline=deadline()), client.score(request(ids=(1, 2)), deadline=deadline())
    )
    assert (right.outcome, right.score, right.metrics) == (SCORED, 1.0, {"length": 3.0})
    assert (wrong.outcome, wrong.score) == (SCORED, 0.0)


@pytest.mark.parametrize("do", ["busy", "regex", "sleep", "fork_and_hang"])
async def test_timed_out_when_the_function_hangs(
    make_client: Callable[..., ProcessRewardClient], do: str, tmp_path: Path
) -> None:
    client = make_client(limit_s=0.5)
    await client.score(request(), deadline=deadline())
    began = time.monotonic()
    hanging = client.score(request(do, truth=str(tmp_path / "pid")), deadline=deadline())
    quick = [client.score(request(sample=i), deadline=deadline()) for i in range(64)]
    first, *others = await asyncio.gather(hanging, *quick)
    assert first.outcome == TIMED_OUT
    assert first.score is None
    assert "0.5 s" in first.reason
    assert [result.score for result in others] == [1.0] * 64
    assert time.monotonic() - began < 10
    if do == "fork_and_hang":
        assert not alive(int((tmp_path / "pid").read_text()))


async def test_clock_starts_at_execution_when_many_are_queued(make_client: Callable[..., ProcessRewardClient]) -> None:
    client = make_client(limit_s=0.4)
    hanging = [client.score(request("sleep", sample=i), deadline=deadline()) for i in range(3)]
    results = await asyncio.gather(*hanging, client.score(request(sample=3), deadline=deadline()))
    assert [result.outcome for result in results] == [TIMED_OUT, TIMED_OUT, TIMED_OUT, SCORED]


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("raise", "KeyError: 'no answer'"),
        ("exit", "SystemExit: 3"),
        ("nan", "finite"),
        ("huge", "finite in float32"),
        ("text", "must return a number"),
        ("die", "exit code 7"),
    ],
)
async def test_failed_when_there_is_no_score(
    make_client: Callable[..., ProcessRewardClient], do: str, reason: str
) -> None:
    client = make_client()
    bad, good = await asyncio.gather(
        client.score(request(do), deadline=deadline()), client.score(request(), deadline=deadline())
    )
    assert bad.outcome == FAILED
    assert bad.score is None
    assert reason in bad.reason
    assert good.score == 1.0


async def test_answers_once_when_the_function_forks(make_client: Callable[..., ProcessRewardClient]) -> None:
    client = make_client()
    results = await asyncio.gather(
        *(client.score(request("fork" if i % 2 else "", sample=i), deadline=deadline()) for i in range(20))
    )
    assert [result.score for result in results] == [1.0] * 20


async def test_raises_when_the_function_cannot_be_loaded(make_client: Callable[..., ProcessRewardClient]) -> None:
    client = make_client(name="compute_scores")
    with pytest.raises(RewardError, match=r"no function 'compute_scores'.*functions there: compute_score"):
        await client.score(request(), deadline=deadline())
    with pytest.raises(RewardError):
        await client.score(request(), deadline=deadline())


async def test_wait_timeout_when_the_caller_has_no_time(make_client: Callable[..., ProcessRewardClient]) -> None:
    client = make_client(limit_s=20.0)
    with pytest.raises(WaitTimeout, match="reward of 0-0-0"):
        await client.score(request("sleep"), deadline=deadline(0.3))


async def test_nothing_is_left_when_closed(make_client: Callable[..., ProcessRewardClient], tmp_path: Path) -> None:
    client = make_client(num_processes=2)
    pid_file = tmp_path / "pid"
    running = asyncio.ensure_future(client.score(request("fork_and_hang", truth=str(pid_file)), deadline=deadline()))
    await until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    pool = client._pool
    assert pool is not None
    pids = [*pool.pids, int(pid_file.read_text())]
    assert all(alive(pid) for pid in pids)
    await client.close()
    await client.close()
    with pytest.raises(RewardError, match="closed"):
        await running
    await until(lambda: not any(alive(pid) for pid in pids))


def sleepers(mark: str) -> list[int]:
    """Processes that carry the mark of a reward process and are no Python."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and "sleep" in (folder / "comm").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("do", ["session", "session_and_hang"])
async def test_what_left_its_session_and_its_parent_is_gone_when_closed(
    make_client: Callable[..., ProcessRewardClient], tmp_path: Path, do: str
) -> None:
    client = make_client(limit_s=1.0)
    result = await client.score(request(do, truth=str(tmp_path / "pid")), deadline=deadline())
    assert result.outcome == (SCORED if do == "session" else TIMED_OUT), result.reason
    assert (tmp_path / "pid").exists()
    pool = client._pool
    assert pool is not None
    if do == "session":
        (child,) = pool._children
        await until(lambda: len(sleepers(child._mark)) == 1)
        (pid,) = sleepers(child._mark)
        await client.close()
        await until(lambda: not alive(pid))
    else:
        await until(lambda: not sleepers(str(tmp_path)))
        await client.close()


@pytest.mark.parametrize("do", ["bare", "bare_and_hang", "bare_and_die"])
async def test_what_dropped_its_environment_is_gone_too(
    make_client: Callable[..., ProcessRewardClient], tmp_path: Path, do: str
) -> None:
    client = make_client(limit_s=1.0)
    result = await client.score(request(do, truth=str(tmp_path / "pid")), deadline=deadline())
    assert result.outcome == {"bare": SCORED, "bare_and_hang": TIMED_OUT, "bare_and_die": FAILED}[do], result.reason
    pid = int((tmp_path / "pid").read_text())
    if do == "bare":
        assert alive(pid)
        await client.close()
    await until(lambda: not alive(pid))


async def test_a_reason_that_is_no_text_can_be_written(make_client: Callable[..., ProcessRewardClient]) -> None:
    result = await make_client().score(request("half"), deadline=deadline())
    assert result.outcome == FAILED
    assert "BaseException: a b\\ud800 (reward.py:" in result.reason
    result.reason.encode()


async def test_a_function_that_hangs_at_its_import_is_given_up_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    setup = Setup(
        function="verl_trainers.rewards.verl_function:VerlFunction",
        options={"path": str(tmp_path / "slow.py")},
        key="reward.custom_reward_function",
        limit_s=5.0,
        start_limit_s=1.0,
    )
    began = time.monotonic()
    reason = RewardProbe(setup).finish()
    assert reason is not None
    assert "reward.start_limit_s=1 s" in reason
    assert time.monotonic() - began < 15


async def test_cheap_when_a_step_asks_for_many(make_client: Callable[..., ProcessRewardClient]) -> None:
    client = make_client()
    await client.score(request(), deadline=deadline())
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        await asyncio.gather(*(client.score(request(sample=i), deadline=deadline()) for i in range(128)))
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.25


ORPHAN = """
import asyncio, sys
from verl_contracts.rewards import RewardRequest
from verl_trainers.rewards.pool import RewardPool
from verl_trainers.rewards.wire import Setup

async def main(path, do, pid_file):
    options = {"path": path, "name": "compute_score"}
    function = "verl_trainers.rewards.verl_function:VerlFunction"
    pool = RewardPool(Setup(function=function, options=options, key="reward", limit_s=0.5), num_processes=1)
    def ask(do):
        return pool.submit(RewardRequest(uid="0-0-0", sample=0, data_source="t", response_ids=(), ground_truth=pid_file,
                                         extra_info={"do": do}), "")
    await ask("")
    hanging = ask(do)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    print(pool.pids[0], flush=True)
    import time; time.sleep(60)  # the loop is stuck, so that only the kill ends anything

asyncio.run(main(*sys.argv[1:]))
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("do", ["fork_and_hang", "bare_and_hang", "regex"])
async def test_nothing_outlives_a_parent_that_is_killed(
    make_client: Callable[..., ProcessRewardClient], tmp_path: Path, do: str
) -> None:
    pid_file = tmp_path / "pid"
    with start(ORPHAN, str(tmp_path / "reward.py"), do, str(pid_file)) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        if do != "regex":
            await until(lambda: pid_file.exists() and bool(pid_file.read_text()))
            pids.append(int(pid_file.read_text()))
        assert all(alive(pid) for pid in pids)
        parent.kill()
        parent.wait(timeout=10)
    await until(lambda: not any(alive(pid) for pid in pids))
