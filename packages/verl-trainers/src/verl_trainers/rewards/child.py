"""The process that runs a reward function, ``python -m verl_trainers.rewards.child``; killed when it takes too long.

Owns nothing but the function. It speaks over descriptors of its own, so that a function may print; it ends when the
parent does; what the function forked is not let back into this loop. Imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, cast

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_plugin, load_plugin
from verl_contracts.plugins.families import REWARD_FUNCTION
from verl_contracts.rewards import RewardResult
from verl_contracts.samples import FAILED
from verl_trainers.rewards.family import MARK, end_family
from verl_trainers.rewards.wire import CHUNK, Done, FrameReader, Job, NotReady, Ready, Setup, pack, write_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_contracts.rewards import RewardFunction

__all__ = ["main"]

_PARENT_CHECK_S = 0.5
_MAX_REASON = 300
"""Most characters kept of what a function says."""


def main() -> int:
    """Serve until the parent closes the pipe."""
    source, sink = _take_pipes()
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    frames = _frames(source)
    setup = cast("Setup", next(frames))
    try:
        function: RewardFunction = build_plugin(
            load_plugin(REWARD_FUNCTION, setup.function, key=setup.key, role="reward process"),
            setup.options,
            key="reward.options",
        )
    except (Exception, SystemExit) as exc:  # the user's code: the parent reports it
        traceback.print_exc()
        write_all(sink, pack(NotReady(reason=_reason(exc))))
        return 1
    write_all(sink, pack(Ready()))
    own = os.getpid()
    for frame in frames:
        for job in cast("tuple[Job, ...]", frame):
            # Only if the parent is gone does this ever fire: the kernel ends a loop that never lets the watcher run.
            signal.setitimer(signal.ITIMER_PROF, setup.limit_s * (os.cpu_count() or 1) + 1.0)
            result = _judge(function, job)
            if os.getpid() != own:
                os._exit(0)
            write_all(sink, pack(Done.of(job.number, result)))
        signal.setitimer(signal.ITIMER_PROF, 0)
    return 0


def _judge(function: RewardFunction, job: Job) -> RewardResult:
    try:
        result = function.score(job.request, job.response)
        if not isinstance(result, RewardResult):
            raise TypeError(f"score() must return a RewardResult, got {type(result).__name__}")
        return RewardResult(  # with plain numbers, so that the parent needs no module of the function's
            outcome=result.outcome,
            score=None if result.score is None else float(result.score),
            metrics={str(name): float(value) for name, value in result.metrics.items()},
            reason=str(result.reason)[:_MAX_REASON],
        )
    except BaseException as exc:
        return RewardResult(outcome=FAILED, reason=_reason(exc))


def _reason(exc: BaseException) -> str:
    """Say what was raised and where, in one line; errors of the configuration speak for themselves."""
    if isinstance(exc, ConfigError):
        return str(exc)
    if isinstance(exc, SyntaxError):
        return f"SyntaxError: {exc.msg} ({Path(exc.filename or '?').name}:{exc.lineno})"
    where = traceback.extract_tb(exc.__traceback__)[-1]
    text = str(exc)[:_MAX_REASON].replace("\n", " ")
    return f"{type(exc).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


def _take_pipes() -> tuple[int, int]:
    """Keep stdin and stdout for the protocol, and give the function harmless ones."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return source, sink


def _frames(source: int) -> Iterator[object]:
    reader = FrameReader()
    while data := os.read(source, CHUNK):
        yield from reader.feed(data)


def _end_with_parent(parent: int) -> None:
    """End this process and what descends from it once the parent is gone."""
    own, mark = os.getpid(), os.environ[MARK]
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    end_family(own, mark)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
