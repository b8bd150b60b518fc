"""A receiver in a process of its own, which copies every tensor into memory that exists, as an engine does."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch

from verl_ckpt_engine import tally
from verl_ckpt_engine.bench.payload import make_weights
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.plugins import families, load_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from verl_contracts.weights import EndpointInfo, Plan, WeightReceiver

__all__ = ["LIMIT_S", "Answered", "PeakMemory", "Receiver", "digests", "receiver_process"]

LIMIT_S: Final = 120.0
"""Longest that one transfer may take."""

Answered = tuple[dict[str, int], int]
"""Digests of what was received, and the most memory that it took beyond the weights, in bytes."""


class PeakMemory:
    """How much more memory this process had at its most since the last `reset`, shared memory included."""

    def reset(self) -> None:
        """Begin anew."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = self._read("VmRSS")

    def extra(self) -> int:
        """Return bytes."""
        return max(0, self._read("VmHWM") - self._before)

    @staticmethod
    def _read(name: str) -> int:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status does not say {name}")


class Receiver:
    """The near end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def prepare(self, session: str) -> EndpointInfo:
        """Return where it listens."""
        self._pipe.send(session)
        return cast("EndpointInfo", self.answer())

    def begin(self, plan: Plan) -> None:
        """Let it receive."""
        self._pipe.send(plan)

    def answer(self) -> object:
        """Return what it says. Raises what it raised, and `TimeoutError`."""
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"a receiving process said nothing for {LIMIT_S:g} s")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found


@contextmanager
def receiver_process(backend: str, name: str, num_bytes: int, *, hashes: bool = True) -> Iterator[Receiver]:
    """Yield a fresh receiver, which is ready."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, backend, name, num_bytes, hashes), daemon=True)
    child.start()
    theirs.close()
    receiver = Receiver(ours)
    try:
        receiver.answer()
        yield receiver
        ours.send(None)
        child.join(LIMIT_S)
    finally:
        child.kill()
        child.join(LIMIT_S)


@contextmanager
def digests(made: bool) -> Iterator[None]:
    """Make none where they are not `made`, in this process: to learn what they cost."""
    names = vars(tally)
    before = names["payload_hasher"]
    if not made:
        names["payload_hasher"] = lambda num_bytes, verification: _Nothing()
    try:
        yield
    finally:
        names["payload_hasher"] = before


class _Nothing:
    """Reads nothing."""

    def update(self, data: memoryview, /) -> None:
        """Do nothing."""

    def intdigest(self) -> int:
        """Return the same for everything."""
        return 0


def _serve(pipe: Connection, backend: str, name: str, num_bytes: int, hashes: bool) -> None:
    torch.set_num_threads(1)
    clock, memory = SystemClock(), PeakMemory()
    target = make_weights(num_bytes, seed=2)
    found = load_plugin(families.WEIGHT_BACKEND, backend, key="--backend")
    receiver: WeightReceiver = found.receiver_class(owner=name, clock=clock)  # type: ignore[call-arg]
    pipe.send("ready")
    while (session := pipe.recv()) is not None:  # wait: a daemon, which ends with its parent
        try:
            pipe.send(receiver.prepare(session=session, rank=0))
            plan = pipe.recv()  # wait: as above
            memory.reset()
            with digests(hashes):
                report = receiver.receive(plan, target, deadline=Deadline.after(clock, LIMIT_S))
            pipe.send((dict(report.digests), memory.extra()))
        except Exception as exc:  # the parent raises it
            pipe.send(exc)
        receiver.close()
    receiver.close()
