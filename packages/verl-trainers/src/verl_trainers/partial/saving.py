"""Policy workers that write each batch down instead of training on it: a step whose update is left out.

What was written is visible under its own name only when it is complete.
"""

from __future__ import annotations

import asyncio
import os
import time
from itertools import groupby
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_contracts.samples import Trajectory
from verl_contracts.training import StepResult
from verl_trainers.partial.rollout_file import group_line, head_line, last_line

if TYPE_CHECKING:
    from pathlib import Path

    from verl_contracts.clock import Deadline
    from verl_contracts.runtime import Caller, PayloadRef
    from verl_contracts.training import PolicyWorkers, StepContext, TrainBatch
    from verl_contracts.weights import WeightSenderHost
    from verl_trainers.partial.rollout_file import RolloutHead

__all__ = ["RolloutSaver"]


class RolloutSaver:
    """Stands in front of the workers, whose weights sample. `finish` when the last batch is in."""

    def __init__(self, workers: PolicyWorkers, *, path: Path, head: RolloutHead, caller: Caller) -> None:
        """Begin the file."""
        self._workers = workers
        self._path = path
        self._caller = caller
        self._partial = path.with_suffix(".partial")
        self._partial.write_text(head_line(head) + "\n", encoding="utf-8")
        self._groups = 0

    @property
    def sender_host(self) -> WeightSenderHost:
        """That of the workers."""
        return self._workers.sender_host

    async def update(self, batch: TrainBatch, context: StepContext, /, *, deadline: Deadline) -> StepResult:
        """Fetch the payloads and write them down. The policy stays what it was."""
        began = time.perf_counter()
        parts = await asyncio.gather(*(self._fetch(row.payload, deadline) for row in batch.rows))
        lines = [
            group_line(uid, list(samples))
            for uid, samples in groupby(zip(batch.rows, parts, strict=True), key=lambda pair: pair[0].uid)
        ]
        with self._partial.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        self._groups += len(lines)
        seconds = {"write": time.perf_counter() - began}
        return StepResult(version=context.step, rows=len(batch.rows), updates=0, metrics=(), seconds=seconds)

    async def save(self, path: str, /, *, deadline: Deadline) -> None:
        """Write the policy, which is what it was."""
        await self._workers.save(path, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the workers."""
        await self._workers.close(deadline=deadline)

    def finish(self) -> None:
        """Complete the file and give it its name."""
        with self._partial.open("a", encoding="utf-8") as file:
            file.write(last_line(self._groups) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._partial, self._path)  # noqa: PTH105  the name says that it is atomic

    async def _fetch(self, ref: PayloadRef, deadline: Deadline) -> tuple[Trajectory, ...]:
        value = await self._caller.get(ref, deadline=deadline)
        if not isinstance(value, tuple) or not all(isinstance(part, Trajectory) for part in value):
            raise DataError(f"a payload must be a tuple of Trajectory, got {type(value).__name__}")
        return value


if TYPE_CHECKING:

    def _is_policy_workers(x: RolloutSaver) -> PolicyWorkers:
        return x
