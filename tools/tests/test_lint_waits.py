"""The rule about waits: each snippet says what is refused, and each twin of it says what is not."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import lint_waits
import pytest

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = {
    "event": "async def f():\n    await event.wait()",
    "queue_get": "async def f():\n    item = await self.queue.get()",
    "queue_put": "async def f():\n    await self._queue.put(item)",
    "queue_join": "async def f():\n    await queue.join()",
    "lock_acquire": "async def f():\n    await lock.acquire()",
    "async_with_lock": "async def f():\n    async with self._lock:\n        pass",
    "condition": "async def f():\n    await condition.wait_for(lambda: ready)",
    "future": "async def f():\n    return await future",
    "attribute_future": "async def f():\n    await self._closed",
    "gather_tasks": "async def f():\n    await asyncio.gather(*tasks)",
    "gather_made_tasks": "async def f():\n    ts = [create_task(g(x)) for x in xs]\n    await asyncio.gather(*ts)",
    "shield": "async def f():\n    await asyncio.shield(self._task)",
    "asyncio_wait": "async def f():\n    await asyncio.wait(tasks)",
    "asyncio_wait_none": "async def f():\n    await asyncio.wait(tasks, timeout=None)",
    "wait_for_none": "async def f():\n    await asyncio.wait_for(event.wait(), None)",
    "timeout_none": "async def f():\n    async with asyncio.timeout(None):\n        await event.wait()",
    "as_completed": "async def f():\n    for each in asyncio.as_completed(tasks):\n        pass",
    "stream": "async def f():\n    line = await reader.readline()",
    "process": "async def f():\n    await process.communicate()",
    "gather_events": "async def f():\n    await asyncio.gather(first.wait(), second.wait())",
    "nested_function": "async def f():\n    async with asyncio.timeout(1):\n        def g():\n            event.wait()",
    "after_timeout": "async def f():\n    async with asyncio.timeout(1):\n        pass\n    await event.wait()",
    "thread_join": "thread.join()",
    "process_wait": "process.wait()",
    "process_wait_none": "process.wait(timeout=None)",
    "thread_queue_get": "queue.get()",
    "thread_queue_get_block": "queue.get(True)",
    "threading_lock": "lock.acquire()",
    "threading_condition": "condition.wait_for(ready)",
    "connection": "connection.recv()",
    "future_result": "def f():\n    return asyncio.run_coroutine_threadsafe(g(), loop).result()",
    "subprocess_run": "subprocess.run(['ls'], check=True)",
    "subprocess_from": "from subprocess import check_output\ncheck_output(['ls'])",
    "ray_get": "ray.get(refs)",
    "ray_wait": "ray.wait(refs, num_returns=1)",
    "futures_wait": "from concurrent.futures import wait\nwait(futures)",
    "connections_wait": "from multiprocessing import connection\nconnection.wait(sentinels)",
    "waitpid": "os.waitpid(pid, 0)",
    "select": "select.select([a], [], [])",
    "create_connection": "socket.create_connection(('host', 1))",
    "socket": "def f():\n    s = socket.socket()\n    s.connect(('host', 1))",
    "urlopen": "from urllib.request import urlopen\nurlopen('http://host')",
}

ALLOWED = {
    "bounded": "async def f():\n    await bounded(event.wait(), subject='s', holder='h', deadline=d)",
    "bounded_future": "async def f():\n    await bounded(future, subject='s', holder='h', deadline=d)",
    "wait_for": "async def f():\n    await asyncio.wait_for(queue.get(), 3)",
    "timeout": "async def f():\n    async with asyncio.timeout(1):\n        await event.wait()",
    "timeout_at": "async def f():\n    async with asyncio.timeout_at(when), lock:\n        await event.wait()",
    "named_timeout": "async def f():\n    limit = asyncio.timeout(1)\n    async with limit:\n        await future",
    "asyncio_wait": "async def f():\n    await asyncio.wait(tasks, timeout=1)",
    "coroutine": "async def f():\n    await g()\n    await asyncio.gather(g(), h(), *(k(x) for x in xs))",
    "made_here": "async def f():\n    stops = [g(x) for x in xs]\n    await asyncio.gather(*stops)",
    "polled": "def f():\n    if connection.poll(1):\n        return connection.recv()",
    "sleep": "async def f():\n    await asyncio.sleep(1)",
    "spawned": "async def f():\n    task = asyncio.create_task(event.wait())",
    "domain_methods": "async def f():\n    await balancer.acquire(3, keys=keys)\n    await caller.put(value)",
    "domain_drain": "async def f():\n    await balancer.drain(replica, deadline=d)",
    "domain_get": "async def f():\n    await caller.get(ref, deadline=d)",
    "task_result": "def f(done: asyncio.Task[int]):\n    return done.result()",
    "asyncio_result": "def f(self):\n    return self.granted.result()",
    "done_result": "async def f():\n    return future.result()",
    "mapping_get": "mapping.get('key')\nmapping.get('key', None)",
    "context_variable": "from contextvars import ContextVar\nv: ContextVar[int] = ContextVar('v')\nv.get()",
    "string_join": "', '.join(words)\nos.path.join(a, b)",
    "timed_join": "thread.join(5)\nthread.join(timeout=5)",
    "timed_wait": "event.wait(0.1)\nprocess.wait(timeout=remaining)",
    "timed_get": "queue.get(timeout=1)\nqueue.get(True, 1)\nqueue.get(block=False)",
    "timed_acquire": "lock.acquire(timeout=1)\nlock.acquire(blocking=False)",
    "timed_condition": "condition.wait_for(ready, 1)",
    "mutex": "with self._lock:\n    pass",
    "timed_result": "future.result(timeout=1)\nfuture.result(1)",
    "timed_run": "subprocess.run(['ls'], check=True, timeout=5)\nsubprocess.run(['ls'], **options)",
    "timed_ray": "ray.get(refs, timeout=3)\nray.wait(refs, timeout=0)",
    "own_get": "store.ray.get(refs)",
    "waitpid": "os.waitpid(pid, os.WNOHANG)",
    "select": "select.select([a], [], [], 0.1)",
    "timed_connection": "socket.create_connection(('host', 1), timeout=3)\nsocket.create_connection(('host', 1), 3)",
    "timed_socket": "def f():\n    with socket.socket() as s:\n        s.settimeout(3)\n        s.connect(('host', 1))",
    "free_port": "def f():\n    with socket.socket() as s:\n        s.bind(('', 0))\n        return s.getsockname()[1]",
    "waived": "thread.join()  # wait: ends when the parent does",
    "waived_over_lines": "subprocess.run(\n    ['ls'],  # wait: nothing to wait for in ls\n    check=True,\n)",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_check_source_refuses_a_wait_without_a_limit(source: str) -> None:
    findings = lint_waits.check_source(source)
    assert findings
    assert all("waits without a limit" in finding.text for finding in findings)


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED.keys())
def test_check_source_allows_a_limited_wait(source: str) -> None:
    assert lint_waits.check_source(source) == []


def test_check_source_names_the_line_of_each_finding() -> None:
    source = textwrap.dedent("""
        async def f():
            await first.wait()
            await g()
            await second.wait()
    """)
    assert [finding.line for finding in lint_waits.check_source(source)] == [3, 5]


@pytest.mark.parametrize("reason", ["", " ", " short"])
def test_check_source_refuses_a_waiver_without_a_reason(reason: str) -> None:
    (finding,) = lint_waits.check_source(f"thread.join()  # wait:{reason}")
    assert "must say why" in finding.text


def test_check_source_refuses_a_waiver_that_waives_nothing() -> None:
    (finding,) = lint_waits.check_source("thread.join(1)  # wait: this was once needed")
    assert "waives nothing" in finding.text


def test_check_source_ignores_a_waiver_inside_a_string() -> None:
    assert lint_waits.check_source('text = "# wait: no comment at all"') == []


def test_main_reads_folders_and_leaves_tests_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("thread.join()\n")
    (tmp_path / "good.py").write_text("thread.join(1)\n")
    assert lint_waits.main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text("\nthread.join()\n")
    assert lint_waits.main([str(tmp_path)]) == 1
    assert f"{tmp_path / 'bad.py'}:2: thread.join() waits without a limit" in capsys.readouterr().err
