"""Writes some samples of each step down, with the version of the weights that made each token."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline
from verl_contracts.samples import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_contracts.runtime import Runtime
    from verl_contracts.samples import GroupResult

__all__ = ["SampleLog"]

_log = logging.getLogger(__name__)


class SampleLog:
    """Appends JSON lines. Fetching happens beside training, and a failure of it harms nothing."""

    def __init__(self, path: str | Path, *, decode: Callable[[Sequence[int]], str], per_step: int = 1) -> None:
        """Write to `path`, the first `per_step` groups of each step, one sample of each."""
        self._path = Path(path)
        self._decode = decode
        self._per_step = per_step
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, runtime: Runtime) -> Callable[[int, Sequence[GroupResult]], None]:
        """Return what is to be called with each step and its groups."""

        def on_batch(step: int, groups: Sequence[GroupResult]) -> None:
            task = asyncio.get_running_loop().create_task(self._write(runtime, step, groups[: self._per_step]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return on_batch

    async def _write(self, runtime: Runtime, step: int, groups: Sequence[GroupResult]) -> None:
        lines = []
        for group in groups:
            sample = group.scored[0]
            if sample.payload is None:
                continue
            try:
                value = await runtime.get(sample.payload, deadline=Deadline.after(runtime.clock, 30.0))
            except Exception as exc:
                _log.warning("sample %s/%d of step %d could not be fetched: %s", group.uid, sample.index, step, exc)
                continue
            for trajectory in value if isinstance(value, tuple) else ():
                if not isinstance(trajectory, Trajectory):
                    continue
                split = trajectory.prompt_length
                lines.append(
                    json.dumps(
                        {
                            "step": step,
                            "uid": str(group.uid),
                            "sample": sample.index,
                            "score": sample.score,
                            "prompt": self._decode(trajectory.ids[:split]),
                            "response": self._decode(trajectory.ids[split:]),
                            "spans": [[s.version, s.kv_version, s.start, s.end] for s in trajectory.spans],
                        },
                        ensure_ascii=False,
                    )
                )
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
