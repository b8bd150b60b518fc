"""Ctrl-C and a killed driver: nothing is left running, and nothing is left in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driving import command, environment

MARK = "VERL_TEST_RUN"


def processes(mark: str) -> dict[int, str]:
    """Pid → command line of every process that carries `mark` in its environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except OSError:
            continue
    return {pid: line for pid, line in found.items() if line}


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def heed_interrupts() -> None:
    """A test run that was started in the background ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    mark = tmp_path.name + str(os.getpid())
    yield mark
    for pid in processes(mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGINT, 20.0), (signal.SIGKILL, 30.0)], ids=["int", "kill"])
def test_nothing_is_left_behind(
    number: signal.Signals, limit_s: float, runtime: str, mark: str, tmp_path: Path
) -> None:
    before = set(Path("/dev/shm").iterdir())
    out = tmp_path / "run"
    log = (tmp_path / "output").open("wb")
    process = subprocess.Popen(
        command(out, f"runtime={runtime}", "trainer.total_training_steps=100000"),
        env=environment() | {MARK: mark},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    events = out / "events.jsonl"
    assert until(lambda: events.exists() and '"step.end"' in events.read_text(), 90.0), log
    process.send_signal(number)
    process.wait(timeout=limit_s)
    log.close()
    if number == signal.SIGINT:
        assert process.returncode == 130, (tmp_path / "output").read_text()
    assert until(lambda: not processes(mark), limit_s), processes(mark)

    def segments() -> set[Path]:
        return {path for path in set(Path("/dev/shm").iterdir()) - before if "verl" in path.name}

    assert until(lambda: not segments(), 5.0), segments()
