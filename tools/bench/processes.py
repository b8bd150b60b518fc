"""A side of a comparison in a process of its own, where one side's state would change the other's speed.

Owns the limit and the environment: a child that hangs is killed with everything it started, and one that fails is
reported with its last lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TOOLS", "answer_of", "run_python"]

TOOLS = Path(__file__).resolve().parents[1]
"""Folder that `bench` is imported from."""
LAST_LINES = 20


def run_python(arguments: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> str:
    """Run this Python with `arguments` and return what it printed. Raises `BenchError` when it fails or hangs.

    `bench` is importable in the child. Variables in `env` are added to this process's.
    """
    path = os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            out, errors = child.communicate(timeout=limit_s)
        except BaseException as exc:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            if isinstance(exc, subprocess.TimeoutExpired):
                raise BenchError(f"{' '.join(command)} did not end within {limit_s:g} s") from exc
            raise
    if child.returncode != 0:
        lines = "\n".join(f"{out}\n{errors}".strip().splitlines()[-LAST_LINES:])
        raise BenchError(f"{' '.join(command)} ended with {child.returncode}:\n{lines}")
    return out


def answer_of(module: str, question: Mapping[str, object], *, limit_s: float) -> dict[str, float]:
    """Run `module` as a script, with `question` as its argument in JSON, and return the numbers on its last line."""
    out = run_python(["-m", module, json.dumps(question)], limit_s=limit_s)
    try:
        answer = json.loads(out.strip().splitlines()[-1])
        return {str(name): float(value) for name, value in answer.items()}
    except (IndexError, ValueError, AttributeError, TypeError) as exc:
        raise BenchError(f"{module} should end with a line of JSON numbers, and printed {out[-500:]!r}") from exc
