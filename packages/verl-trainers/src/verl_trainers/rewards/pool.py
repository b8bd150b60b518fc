"""A queue of rewards in front of killable processes.

Owns which job is where. A job that runs too long takes its process with it and is timed out; those queued behind it in
the same process go back to the front of the queue. A verdict is never made up: what has none is timed out or failed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING

from verl_contracts.errors import RewardError
from verl_contracts.rewards import RewardResult
from verl_contracts.samples import FAILED, TIMED_OUT
from verl_trainers.rewards.process import ChildProcess
from verl_trainers.rewards.wire import Job

if TYPE_CHECKING:
    from verl_contracts.rewards import RewardRequest
    from verl_trainers.rewards.wire import Setup

__all__ = ["RewardPool"]

_log = logging.getLogger(__name__)

_MAX_CHUNK = 32
"""Jobs that one process is given at once."""
_MAX_BAD_STARTS = 3
"""Starts in a row that may fail before the pool gives up."""


class RewardPool:
    """Runs rewards in `num_processes` children. Used from one event loop; `close` it."""

    def __init__(self, setup: Setup, *, num_processes: int) -> None:
        self._setup = setup
        self._numbers = itertools.count()
        self._pending: deque[Job] = deque()
        self._futures: dict[int, asyncio.Future[RewardResult]] = {}
        self._broken: str | None = None
        self._bad_starts = 0
        self._kicked = False
        self._reaping: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._children: list[ChildProcess] = []
        for _ in range(num_processes):
            self._spawn()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children."""
        return tuple(child.pid for child in self._children)

    def submit(self, request: RewardRequest, response: str) -> asyncio.Future[RewardResult]:
        """Queue one reward. Jobs that are queued in one tick travel together.

        The future raises `RewardError` when the function cannot be loaded or the pool is closed.
        """
        future: asyncio.Future[RewardResult] = self._loop.create_future()
        if self._broken is not None:
            future.set_exception(RewardError(self._broken))
            return future
        job = Job(number=next(self._numbers), request=request, response=response)
        self._pending.append(job)
        self._futures[job.number] = future
        self._kick()
        return future

    async def close(self) -> None:
        """Kill the children with everything that they forked. Idempotent; what is unanswered raises `RewardError`."""
        self._give_up("the reward processes are closed")
        if self._reaping:
            await asyncio.wait(self._reaping, timeout=10.0)

    def _spawn(self) -> None:
        self._children.append(ChildProcess(self._setup, on_done=self._done, on_end=self._ended))

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Spread what is pending over the children that have nothing to do."""
        self._kicked = False
        idle = [child for child in self._children if not child.jobs]
        for i, child in enumerate(idle):
            share = min(_MAX_CHUNK, -(-len(self._pending) // (len(idle) - i)))
            jobs: list[Job] = []
            while self._pending and len(jobs) < share:
                job = self._pending.popleft()
                if self._futures[job.number].done():  # nobody waits for it any more
                    del self._futures[job.number]
                else:
                    jobs.append(job)
            if jobs:
                child.submit(jobs)

    def _done(self, child: ChildProcess, number: int, result: RewardResult) -> None:
        self._bad_starts = 0
        self._answer(number, result)
        if not child.jobs and self._pending:
            self._kick()

    def _answer(self, number: int, result: RewardResult) -> None:
        future = self._futures.pop(number)
        if not future.done():
            future.set_result(result)

    def _ended(self, child: ChildProcess, reason: str, expired: bool) -> None:
        self._children.remove(child)
        task = self._loop.create_task(child.reap())
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)
        if self._broken is not None:
            return
        jobs = child.jobs
        if child.ready and jobs:
            job = jobs.popleft()
            _log.warning("reward of %s, sample %d: %s", job.request.uid, job.request.sample, reason)
            self._answer(job.number, RewardResult(outcome=TIMED_OUT if expired else FAILED, reason=reason))
        self._pending.extendleft(reversed(jobs))
        if not child.ready:
            self._bad_starts += 1
            if child.broken is not None or self._bad_starts >= _MAX_BAD_STARTS:
                self._give_up(
                    f"the reward function {self._setup.function!r} cannot be loaded: {child.broken or reason}"
                )
                return
        self._spawn()
        self._kick()

    def _give_up(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
        for child in tuple(self._children):
            child.end(reason)
        for future in self._futures.values():
            if not future.done():
                future.set_exception(RewardError(self._broken))
        self._futures.clear()
        self._pending.clear()
