"""The process that runs a reward function, ``python -m verl_trainers.rewards.child``; killed when it takes too long.

It is two processes. The inner one runs the function and speaks over descriptors of its own, so that a function may
print; what the function forked is not let back into its loop. The outer one runs nobody's code: it adopts what the
function leaves behind, and ends all of it when the inner one or the parent ends, whatever the function is stuck in.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_plugin, load_plugin
from verl_contracts.plugins.families import REWARD_FUNCTION
from verl_contracts.rewards import RewardResult
from verl_contracts.samples import FAILED
from verl_trainers.rewards.family import MARK, adopt_orphans, end_family, end_with_parent
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
    parent = os.getppid()
    adopt_orphans()
    inner = os.fork()
    if inner:
        _guard(inner, parent)
    end_with_parent()
    source, sink = _take_pipes()
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
            result = _judge(function, job)
            if os.getpid() != own:
                os._exit(0)
            write_all(sink, pack(Done.of(job.number, result)))
    return 0


def _judge(function: RewardFunction, job: Job) -> RewardResult:
    try:
        result = function.score(job.request, job.response)
        if not isinstance(result, RewardResult):
            raise TypeError(f"score() must return a RewardResult, got {type(result).__name__}")
        return RewardResult(  # with plain numbers, so that the parent needs no module of the function's
            outcome=result.outcome,
            score=None if result.score is None else float(result.score),
            metrics={_clean(str(name)): float(value) for name, value in result.metrics.items()},
            reason=_clean(str(result.reason)[:_MAX_REASON]),
        )
    except BaseException as exc:
        return RewardResult(outcome=FAILED, reason=_reason(exc))


def _reason(exc: BaseException) -> str:
    """Say what was raised and where, in one line; errors of the configuration speak for themselves."""
    if isinstance(exc, ConfigError):
        return _clean(str(exc))
    if isinstance(exc, SyntaxError):
        return _clean(f"SyntaxError: {exc.msg} ({Path(exc.filename or '?').name}:{exc.lineno})")
    where = traceback.extract_tb(exc.__traceback__)[-1]
    text = str(exc)[:_MAX_REASON].replace("\n", " ")
    return _clean(f"{type(exc).__name__}: {text} ({Path(where.filename).name}:{where.lineno})")


def _clean(text: str) -> str:
    """Return `text` with half a character spelled out, so that it can be written and sent anywhere."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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


def _guard(inner: int, parent: int) -> NoReturn:
    """Stay until `inner` ends, end what it left behind, and end as it did."""
    own, mark = os.getpid(), os.environ[MARK]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # so that the parent sees the pipe close
    threading.Thread(target=_end_with_parent, args=(parent, mark), daemon=True).start()
    while True:
        pid, status = os.waitpid(-1, 0)  # wait: the parent ends it at its limit, the thread when that is gone
        if pid == inner:
            break
    end_family(own, mark)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(own, -code)
    os._exit(code)  # at once: the parent waits a moment for it


def _end_with_parent(parent: int, mark: str) -> None:
    """End this process and what descends from it once the parent is gone."""
    own = os.getpid()
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    end_family(own, mark)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
