"""The transports of outside libraries: the kit's suite, and what each library needs to be kept from.

What a fault costs in a whole sync is in test_ckpt_faults.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch

from verl_ckpt_engine.stream.polling import Polling
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.plugins import families, load_plugin
from verl_contracts.testing.suites.weights import WeightBackendSuite
from verl_contracts.testing.tensors import KeepingTarget, ListSource
from verl_contracts.testing.transfers import Session, ThreadReceiver, run_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection

    from verl_ckpt_engine.nixl import NixlMedium
    from verl_ckpt_engine.stream.medium import Inlet, Medium
    from verl_ckpt_engine.stream.role import Role
    from verl_contracts.weights import WeightBackend, WeightSender

CLOCK = SystemClock()
MIB = 1024 * 1024
BACKENDS = ("nixl", "mooncake")


def backend_of(name: str) -> type[WeightBackend]:
    """Return it, or skip the test where its library is missing."""
    pytest.importorskip(f"verl_ckpt_engine.{name}", exc_type=ImportError)
    return load_plugin(families.WEIGHT_BACKEND, name, key="backend")


def medium_of(name: str) -> Medium:
    return cast("type[Role]", backend_of(name).sender_class).medium()


class TestNixlBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return backend_of("nixl")


class TestNixlBackendOverTcp(WeightBackendSuite):
    """What UCX takes between hosts that have nothing better. By itself it would not, on one host."""

    @pytest.fixture(autouse=True)
    def only_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,self")

    def backend(self) -> type[WeightBackend]:
        return backend_of("nixl")


class TestMooncakeBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return backend_of("mooncake")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_library_is_told_with_its_extra(name: str) -> None:
    script = f"""
import sys
for module in ("nixl", "nixl_cu13", "nixl_cu12", "mooncake"):
    sys.modules[module] = None
from verl_contracts.errors import PluginError
from verl_contracts.plugins import families, load_plugin
try:
    load_plugin(families.WEIGHT_BACKEND, {name!r}, key="checkpoint_engine.backend")
except PluginError as exc:
    print(exc)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert f"run: pip install 'verl-ckpt-engine[{name}]'" in ran.stdout


class Parent:
    """A rank in a process of its own, whose slot holds `size` ones, and which gives it to a child as often as asked."""

    def __init__(self, name: str, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve_parent, args=(theirs, name, size), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(60.0)
        self.place: dict[str, str] = self._pipe.recv()

    def give(self) -> None:
        self._pipe.send("give")

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(10.0)
        elif number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(10.0)
        self._pipe.close()


def _serve_parent(pipe: Connection, name: str, size: int) -> None:
    medium = medium_of(name)
    slot = medium.allocate(size)
    slot.fill_(1)
    outlet = medium.outlet("127.0.0.1", CLOCK)
    pipe.send({**outlet.address, **medium.place([slot])})
    while pipe.poll(60.0) and pipe.recv() == "give":
        outlet.push(slot, Deadline.after(CLOCK, 60.0))


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    backend_of(request.param)
    return str(request.param)


@pytest.fixture
def parent(name: str) -> Iterator[Parent]:
    parent = Parent(name, 8 * MIB)
    yield parent
    parent.stop()


class Child:
    """The other end, in this process."""

    def __init__(self, name: str, place: Mapping[str, str], size: int) -> None:
        self.medium = medium_of(name)
        self.slot = self.medium.allocate(size)
        self.place = dict(place)
        self.inlet: Inlet = self.medium.inlet("127.0.0.1", self.place, CLOCK)
        self.inlet.open(Deadline.after(CLOCK, 10.0))

    def pull(self, limit_s: float) -> run_in_thread[None]:
        deadline = Deadline.after(CLOCK, limit_s)
        return run_in_thread(lambda: self.inlet.pull(self.place, 0, self.slot, deadline))

    def close(self) -> None:
        self.inlet.cut()
        self.inlet.close()
        self.medium.free(self.slot)
        self.medium.close()


@pytest.fixture
def child(name: str, parent: Parent) -> Iterator[Child]:
    """One that got the bucket once, so that both know each other."""
    child = Child(name, parent.place, 8 * MIB)
    child.slot.zero_()
    parent.give()
    assert child.pull(30.0).end().error is None
    assert bool((child.slot == 1).all())
    yield child
    child.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_parent_that_stalls_or_died_holds_a_child_until_the_deadline_at_most(
    parent: Parent, child: Child, number: int
) -> None:
    parent.signal(number)
    ended = child.pull(0.5).end()
    assert ended.error is not None
    assert ended.seconds < 2.0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_cut_ends_what_waits_for_a_parent_that_stalls_or_died(parent: Parent, child: Child, number: int) -> None:
    parent.signal(number)
    pulling = child.pull(60.0)
    time.sleep(0.1)  # until it waits
    child.inlet.cut()
    ended = pulling.end(2.0)
    assert ended.error is not None


def test_a_cut_ends_what_waits_for_a_child(name: str) -> None:
    medium = medium_of(name)
    slot = medium.allocate(MIB)
    outlet = medium.outlet("127.0.0.1", CLOCK)
    pushing = run_in_thread(lambda: outlet.push(slot, Deadline.after(CLOCK, 60.0)))
    time.sleep(0.1)  # until it waits
    outlet.cut()
    assert pushing.end(2.0).value is None
    outlet.close()
    medium.free(slot)
    medium.close()


def mapped(address: int) -> bool:
    """Return whether this process has that address."""
    areas = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in areas)


def test_memory_that_a_parent_may_still_write_to_is_never_somebody_elses() -> None:
    """Within a host UCX writes to another process without asking it: here after the child gave up, and went on."""
    size = 8 * MIB
    sending = cast("NixlMedium", medium_of("nixl"))
    slot = sending.allocate(size)
    slot.fill_(1)
    outlet = sending.outlet("127.0.0.1", CLOCK)
    edge = outlet.address["edge"]
    child = Child("nixl", {**outlet.address, **sending.place([slot])}, size)
    pulling = child.pull(30.0)
    outlet.push(slot, Deadline.after(CLOCK, 30.0))
    assert pulling.end().error is None

    pulling = child.pull(60.0)
    asked = Polling(CLOCK).until(lambda: sending.agent.heard(edge), Deadline.after(CLOCK, 30.0))
    child.close()
    assert pulling.end(5.0).error is not None
    del child, pulling
    gc.collect()
    others = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(8)]
    _, address, peer = asked.split()
    assert mapped(int(address))
    assert not any(0 <= int(address) - other.data_ptr() < size for other in others)
    with suppress(RuntimeError):  # it may know already
        sending.agent.write(slot, peer, int(address), f"{edge} 2")
    assert not any(bool(other.any()) for other in others)
    outlet.cut()
    outlet.close()
    sending.free(slot)
    sending.close()


def test_slots_are_registered_once_for_all_syncs(name: str) -> None:
    backend, side = backend_of(name), ThreadReceiver(backend_of(name), "r0")
    sender: WeightSender | None = None
    places = []
    for value in range(3):
        side.target = KeepingTarget()
        source = ListSource({"w": torch.full((5000,), value)})
        with Session(backend, source, [side], sender=sender) as session:
            session.transfer()
            sender = session.sender
            places.append([place_of(end) for end in (sender, side.receiver)])
        assert bool((side.target.tensors["w"] == value).all())
    assert places[0] == places[1] == places[2]


def place_of(end: object) -> Mapping[str, str]:
    """Return where a rank that served a sync has its slots, and who answers for them."""
    session = cast("Role", end)._session
    assert session is not None
    return session.node.medium.place(session.node.slots)


def held() -> tuple[set[str], int, int]:
    """Return the files that the libraries made, and how many open files and threads there are."""
    gc.collect()  # what tests before left is not to go while we count
    made = [path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("*")]
    ours = {str(path) for path in made if any(word in path.name for word in ("ucx", "nixl", "mooncake"))}
    files, threads = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))
    return ours, files, threads


def grown(before: tuple[set[str], int, int]) -> tuple[set[str], int, int]:
    """Return what there is more of."""
    ours, files, threads = held()
    return ours - before[0], max(0, files - before[1]), max(0, threads - before[2])


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_nothing_stays_behind(name: str, ends: str) -> None:
    def fail(index: int) -> None:
        if index == 3 and ends == "badly":
            raise OSError("the engine is out of order")

    def sync() -> None:
        backend = backend_of(name)
        sides = [ThreadReceiver(backend, f"r{number}", before=fail) for number in range(2)]
        source = ListSource({f"w{number}": torch.ones(MIB) for number in range(8)})
        with Session(backend, source, sides, bucket_bytes=MIB) as session:
            running = [side.start(session.plan, 30.0) for side in sides]
            session.send(30.0).end()
            for each in running:
                each.end()

    sync()  # what a library keeps for ever, it has now
    before = held()
    sync()
    until = time.monotonic() + 10.0
    while (more := grown(before)) != (set(), 0, 0) and time.monotonic() < until:
        time.sleep(0.05)
    assert more == (set(), 0, 0)


def test_ranks_between_two_syncs_take_no_processor(name: str) -> None:
    backend = backend_of(name)
    with Session(backend, ListSource({"w": torch.ones(MIB)}), [ThreadReceiver(backend, "r0")]) as session:
        session.transfer()
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


SCRIPT = """
import sys, threading, time, torch
from verl_contracts.plugins import families, load_plugin
from verl_contracts.testing.tensors import ListSource
from verl_contracts.testing.transfers import Session, ThreadReceiver

torch.set_num_threads(1)
moving = threading.Event()

def hold(index):  # nothing but edges works on
    if index == 2:
        moving.set()
        time.sleep(60.0)

def load(index):
    time.sleep(60.0)

backend = load_plugin(families.WEIGHT_BACKEND, sys.argv[1], key="backend")
source = ListSource({f"w{number}": torch.ones(16 << 20) for number in range(3)}, before=hold)
sides = [ThreadReceiver(backend, f"r{number}", before=load) for number in range(2)]
session = Session(backend, source, sides, bucket_bytes=64 << 20)
running = [side.start(session.plan, 60.0) for side in sides]
sending = session.send(60.0)
assert moving.wait(30.0)
time.sleep(float(sys.argv[2]))
print("leaving")
"""


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("transports", ["all", "tcp,self"])
def test_a_process_may_end_while_weights_move(name: str, transports: str, after_s: float) -> None:
    if name != "nixl" and transports != "all":
        pytest.skip("UCX is nixl's")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(after_s)],
        env={**os.environ, "UCX_TLS": transports, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, "leaving" in ran.stdout) == (0, True), ran.stderr
    assert not any(word in ran.stderr for word in ("Fatal", "terminate", "Segmentation", "Traceback")), ran.stderr
