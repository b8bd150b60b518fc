"""Everything started is stopped: whichever way a driver ends, none of its processes is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from verl_runtime.processes import MARK, sweep
from verl_runtime.ray.guardian import Guardian
from verl_runtime.ray.owner import OwnerWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

_DRIVER = Path(__file__).with_name("driver_for_tests.py")
_MARK = "VERL_TEST_RUN"


def _heed_interrupts() -> None:
    """A test run that was started in the background ignores SIGINT, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Driver:
    """A driver in a process of its own, whose every descendant can be recognized."""

    def __init__(self, mode: str, *, owner_limit_s: float = 10.0) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, str(_DRIVER), mode, str(owner_limit_s)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, _MARK: self.mark},
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        assert self.process.stdout is not None
        self.up = json.loads(self.process.stdout.readline())

    def alive(self) -> dict[int, str]:
        """Return the living processes of this driver, itself included."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text(encoding="utf-8").replace("\0", " ")
            except (OSError, ValueError):
                continue
        return found

    def descendants(self) -> dict[int, str]:
        """Return the processes below the driver and their command lines, whatever their environment says."""
        parents, found = {}, {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                status = (folder / "status").read_text(encoding="utf-8")
                parents[int(folder.name)] = int(status.split("PPid:")[1].split()[0])
                found[int(folder.name)] = (folder / "cmdline").read_text(encoding="utf-8").strip("\0")
        below = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        return {pid: found[pid] for pid in below if pid in found}

    def wait_until_gone(self, limit_s: float) -> None:
        began = time.monotonic()
        while left := self.alive():
            assert time.monotonic() - began < limit_s, f"still there after {limit_s} s: {left}"
            time.sleep(0.05)

    def close(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(autouse=True)
def _ray(request: pytest.FixtureRequest) -> None:
    if "driver" in request.node.name:
        pytest.importorskip("ray", reason="the tests of RayRuntime need ray: pip install 'verl-runtime[ray]'")


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        ("wait", signal.SIGKILL, -signal.SIGKILL),
        ("wait", signal.SIGINT, -signal.SIGINT),
        ("wait", signal.SIGTERM, None),
        ("raise", None, 1),
    ],
)
def test_driver_that_ends_leaves_no_process(mode: str, number: signal.Signals | None, code: int | None) -> None:
    driver = Driver(mode)
    try:
        if number is not None:
            assert len(driver.alive()) >= 7, "Ray, two actors, their children, and the guardian"
            os.kill(driver.process.pid, number)
        driver.wait_until_gone(15.0)
        assert driver.process.wait(10.0) != 0 if code is None else driver.process.wait(10.0) == code
    finally:
        driver.close()
    assert not list(Path("/tmp").glob(f"verl-{driver.up['run_id']}-*")), "the folder of its logs"


def test_title_of_a_process_of_the_driver_leaves_its_mark_in_place() -> None:
    driver = Driver("wait")
    try:
        limit = time.monotonic() + 20.0
        while len(titled := [pid for pid, line in driver.descendants().items() if line.startswith("ray::")]) < 4:
            assert time.monotonic() < limit, "two agents of Ray and two actors set their titles"
            time.sleep(0.05)
        for pid in titled:
            assert f"{MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes(), pid
    finally:
        driver.close()


def test_actors_end_themselves_when_their_driver_is_silent() -> None:
    driver = Driver("wait", owner_limit_s=2.0)
    try:
        time.sleep(3.0)  # real time on purpose: a living driver must be heard for longer than the limit
        everybody = {*driver.up["pids"], *driver.up["children"]}
        assert everybody <= driver.alive().keys()
        os.kill(driver.process.pid, signal.SIGSTOP)
        limit = time.monotonic() + 10.0
        while everybody & driver.alive().keys():
            assert time.monotonic() < limit
            time.sleep(0.05)
    finally:
        driver.close()


def test_owner_watch_fires_once_after_silence_and_not_before() -> None:
    silent = threading.Event()
    watch = OwnerWatch(limit_s=0.4, on_silence=silent.set)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        watch.beat()
        assert not silent.wait(0.02)
    began = time.monotonic()
    assert silent.wait(5.0)
    assert time.monotonic() - began >= 0.3


@pytest.fixture
def stubborn_child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, MARK: "space/run/worker/1.1"},
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


@pytest.mark.parametrize(
    ("mark", "swept"),
    [("space/run/worker/1.1", True), ("space/", True), ("space/run/worker/1", False), ("spac", False), ("e/", False)],
)
def test_sweep_kills_what_carries_the_mark_and_nothing_else(
    stubborn_child: subprocess.Popen[bytes], mark: str, swept: bool
) -> None:
    assert (stubborn_child.pid in sweep(mark=mark)) is swept
    if swept:
        assert stubborn_child.wait(5.0) == -signal.SIGKILL
    else:
        assert stubborn_child.poll() is None


def test_sweep_kills_a_process_group(stubborn_child: subprocess.Popen[bytes]) -> None:
    assert sweep(mark="nobody", groups=(stubborn_child.pid,)) == [stubborn_child.pid]


@pytest.mark.parametrize("forgotten", [False, True])
def test_guardian_kills_the_groups_it_watches(
    stubborn_child: subprocess.Popen[bytes], forgotten: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    guardian = Guardian(namespace="other", folder=str(folder))
    guardian.watch(stubborn_child.pid)
    if forgotten:
        guardian.forget(stubborn_child.pid)
    guardian.close()
    guardian.close()
    assert not folder.exists()
    assert (stubborn_child.poll() is None) is forgotten


def test_without_ray_every_module_imports_and_the_runtime_names_the_fix() -> None:
    code = """
import asyncio, importlib, pkgutil, sys
sys.modules["ray"] = None
import verl_runtime
for found in pkgutil.walk_packages(verl_runtime.__path__, "verl_runtime."):
    importlib.import_module(found.name)
from verl_contracts.clock import SystemClock
from verl_contracts.errors import ConfigError
from verl_contracts.events import NullEvents
from verl_contracts.runtime import RuntimeSettings
from verl_runtime.ray import RayRuntime
try:
    asyncio.run(RayRuntime.create(RuntimeSettings(run_id="a"), clock=SystemClock(), events=NullEvents()))
except ConfigError as exc:
    print(exc)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    (line,) = ran.stdout.splitlines()
    assert "the Ray runtime needs Ray: pip install 'verl-runtime[ray]', or choose runtime=local" in line
