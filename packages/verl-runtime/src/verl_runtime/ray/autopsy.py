"""What is known of an actor that is gone: the reason it left behind, what Ray says, and its last lines.

The first cause comes first: last words of the process itself, then a crash that the interpreter could still report,
then the constructor or node failure that Ray names, and only then "killed".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.failures import MAX_LINES, FailureRecord
from verl_runtime.ray.wire import RayAddress

if TYPE_CHECKING:
    from verl_contracts.runtime import ActorRef

__all__ = ["LAST_WORDS", "describe_death", "oom_kills", "read_tail"]

LAST_WORDS = "[verl] process ended: "
"""Begins the line that a host writes to its log when it can say why it ends."""
_SELF_TOLD = (LAST_WORDS, "Fatal Python error: ")
_MEMORY_HINT = "use fewer or smaller processes, or smaller batches and caches"
_TAIL_BYTES = 16_384


def read_tail(path: str) -> tuple[str, ...]:
    """Return the last lines of a log file, more than a record keeps; none when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines())


def oom_kills() -> int:
    """Return how many processes the kernel killed on this machine for want of memory, 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def describe_death(
    actor: ActorRef, error: BaseException, *, lines: tuple[str, ...], oom_kills_since: int
) -> FailureRecord:
    """Tell why `actor` is gone, from Ray's error and the last lines of its log."""
    start = max(0, len(lines) - MAX_LINES)
    found = next((index for index in reversed(range(len(lines))) if lines[index].startswith(_SELF_TOLD)), None)
    if found is not None:  # what follows, for example a stack of addresses, may be longer than what is kept
        start = min(start, found)
        cause = lines[found].removeprefix(LAST_WORDS)
    else:
        cause = _guess(str(error), oom_kills_since=oom_kills_since) or f"gone: {type(error).__name__}: {error}"
    return FailureRecord(
        role=actor.role,
        rank=actor.rank,
        node=actor.token.node if isinstance(actor.token, RayAddress) else "unknown node",
        cause=cause.splitlines()[0],
        lines=lines[start : start + MAX_LINES],
    )


def _guess(said: str, *, oom_kills_since: int) -> str | None:
    if "running low on memory" in said or "OutOfMemory" in said:
        return f"killed by Ray because memory ran out: {_MEMORY_HINT}"
    if "placement group" in said and "removed" in said:
        return "its pool was released while it ran"
    if oom_kills_since > 0:
        return f"killed by signal 9; the kernel killed processes because memory ran out: {_MEMORY_HINT}"
    if "worker process has died" in said or "Worker unexpectedly exits" in said:
        return "killed by signal 9, or ended in another way that leaves no last words"
    if "node" in said.lower() and "died" in said:
        return "its node died"
    return None
