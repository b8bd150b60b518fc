"""Why vLLM's processes died. vLLM's own exceptions say only that the cause is in the log above.

A replica owns a file in memory. Each process that its vLLM starts loads our plug-in, which writes the errors that vLLM
logs there into it as well; the replica reads them when vLLM is gone. Nothing is left behind, whoever is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import weakref
from typing import Final

from verl_contracts.errors import VerlError

__all__ = ["VARIABLE", "Causes", "leave_interrupts", "report_errors"]

VARIABLE: Final = "VERL_VLLM_ERRORS"
"""Environment variable that tells vLLM's processes where the file is."""
_BURST_S: Final = 10.0
"""Errors that follow each other faster have one cause."""
_LONGEST: Final = 500


class Causes:
    """The errors that the processes of one vLLM logged."""

    def __init__(self) -> None:
        """Create the file; it lives as long as this object and this process."""
        self._file = os.memfd_create("vllm-errors")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """Where those processes find it."""
        weakref.finalize(self, os.close, self._file)

    def first(self) -> str | None:
        """Return the first error; None when none was logged."""
        return next((text for _, text in self._read()), None)

    def last(self) -> str | None:
        """Return the first error of the last that came together; None when none was logged."""
        found: tuple[float, str] | None = None
        for at, text in reversed(self._read()):
            if found is not None and found[0] - at > _BURST_S:
                break
            found = (at, text)
        return None if found is None else found[1]

    def _read(self) -> list[tuple[float, str]]:
        lines = os.pread(self._file, os.fstat(self._file).st_size, 0).splitlines()
        return [(at, text) for at, text in map(json.loads, lines)]


def report_errors() -> None:
    """Let the errors that vLLM logs in this process go to the replica that started it, if one did."""
    if (path := _of_replica()) is not None:
        with contextlib.suppress(OSError):  # a replica that is gone asks nobody
            logging.getLogger("vllm").addHandler(_Reporter(path))


def leave_interrupts() -> None:
    """Let Ctrl-C, which a terminal sends to all processes, end only the replica that started this one: it stops vLLM.

    Else each of vLLM's processes ends on its own, with a traceback, while the replica still uses it.
    """
    if _of_replica() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _of_replica() -> str | None:
    """Return the file of the replica that started this process; None in others, and in the replica's own."""
    path = os.environ.get(VARIABLE)
    return None if path is None or path.startswith(f"/proc/{os.getpid()}/") else path


class _Reporter(logging.Handler):
    """Writes errors into the file of a replica, one line each, except ours: they are told by `control`."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, at once."""
        exc = record.exc_info[1] if record.exc_info else None
        if isinstance(exc, VerlError):
            return
        text = record.getMessage() if exc is None else f"{type(exc).__name__}: {exc}"
        line = json.dumps((record.created, " ".join(text.split())[:_LONGEST]))
        with contextlib.suppress(OSError):
            os.write(self._file, f"{line}\n".encode())
