"""What only the in-process runtime does."""

from __future__ import annotations

import asyncio
import threading

import pytest
from runtime_fixtures import CLOCK, ask, local_runtime, soon, spec

from verl_contracts.errors import ConfigError
from verl_contracts.events import NullEvents
from verl_contracts.runtime import RuntimeSettings
from verl_runtime.local import LocalRuntime


async def test_plain_methods_keep_to_one_thread_of_their_actor() -> None:
    async with local_runtime() as runtime:
        one, two = [await runtime.spawn(spec(rank=rank), deadline=soon()) for rank in range(2)]
        threads = [await ask(runtime, actor, "thread") for actor in (one, one, two)]
        assert threads[0] == threads[1] != threads[2]
        both = [ask(runtime, actor, "compute", seconds=0.2) for actor in (one, two)]
        began = CLOCK.now()
        assert await asyncio.gather(*both) == [1, 1]
        assert CLOCK.now() - began < 0.39, "actors do not wait for each other"


async def test_plain_methods_run_on_the_loop_when_threads_are_off() -> None:
    async with local_runtime(threads=False) as runtime:
        actor = await runtime.spawn(spec(), deadline=soon())
        assert await ask(runtime, actor, "thread") == threading.current_thread().name


async def test_close_leaves_no_thread() -> None:
    before = set(threading.enumerate())  # by identity: threads of other tests may end meanwhile
    async with local_runtime() as runtime:
        await runtime.spawn(spec(), deadline=soon())
        (started,) = set(threading.enumerate()) - before
    started.join(5.0)
    assert not started.is_alive()
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (RuntimeSettings(run_id="a b"), "run_id 'a b'"),
        (RuntimeSettings(run_id="a", owner_limit_s=0.0), "owner_limit_s is 0"),
        (RuntimeSettings(run_id="a", options={"thread": True}), "threads"),
        (RuntimeSettings(run_id="a", options={"num_cpus": "two"}), "num_cpus"),
        (RuntimeSettings(run_id="a", options={"num_cpus": 0}), "num_cpus must be > 0, got 0"),
        (RuntimeSettings(run_id="a", options={"num_cpus": float("nan")}), "num_cpus must be > 0, got nan"),
        (RuntimeSettings(run_id="a", options={"num_gpus": -1}), "num_gpus must be ≥ 0, got -1"),
    ],
)
async def test_wrong_settings_are_refused_by_name(settings: RuntimeSettings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await LocalRuntime.create(settings, clock=CLOCK, events=NullEvents())
