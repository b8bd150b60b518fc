"""Syncs through a folder, and senders of other processes, for the tests of the disk backend."""

from __future__ import annotations

import multiprocessing
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from verl_ckpt_engine.disk import DiskBackend, DiskSender
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import WeightSyncError
from verl_contracts.testing.tensors import ListSource
from verl_contracts.testing.transfers import Session, ThreadReceiver

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from verl_contracts.weights import EndpointInfo, Plan

CLOCK = SystemClock()
WEIGHTS = {f"w{index}": torch.arange(index * 100, index * 100 + 700.0) for index in range(9)}


def plan_of(source: ListSource, session: str, sender: EndpointInfo, receivers: list[EndpointInfo]) -> Plan:
    return DiskBackend.planner_class().plan(
        source.manifest(1), session=session, senders=[sender], receivers=receivers, bucket_bytes=6000
    )


def sync(
    version: int, weights: Mapping[str, torch.Tensor] = WEIGHTS, *, sender: DiskSender | None = None
) -> tuple[DiskSender, Path]:
    """Send one version to one receiver and close; return the sender and the version's folder."""
    made = sender or DiskSender(owner="trainer", rank=0, clock=CLOCK)
    side = ThreadReceiver(DiskBackend, "r0")
    with Session(DiskBackend, ListSource(weights), [side], bucket_bytes=6000, version=version, sender=made) as session:
        session.transfer()
        folder = folder_of(session.plan)
    return made, folder


def folder_of(plan: Plan) -> Path:
    return Path(plan.senders[0].address["folder"])


class SenderProcess:
    """A sender in a spawned process, whose source stalls for ever at the fourth tensor."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_send_and_stall, args=(theirs,), daemon=True)
        self._process.start()

    def prepare(self) -> EndpointInfo:
        return cast("EndpointInfo", self._answer())

    def send(self, plan: Plan) -> None:
        """Return once the sender has stalled."""
        self._pipe.send(plan)
        assert self._answer() == "stalled"

    def kill(self) -> None:
        self._process.kill()
        self._process.join(30.0)

    def _answer(self) -> object:
        assert self._pipe.poll(60.0)
        return self._pipe.recv()


def _send_and_stall(pipe: Connection) -> None:
    def stall(index: int) -> None:
        if index == 3:
            pipe.send("stalled")
            time.sleep(60.0)

    source = ListSource(WEIGHTS, before=stall)
    sender = DiskSender(owner="trainer", rank=0, clock=CLOCK)
    pipe.send(sender.prepare(source.manifest(1), session="killed"))
    if pipe.poll(60.0):
        sender.send(pipe.recv(), source, deadline=Deadline.after(CLOCK, 60.0))


def error_on_a_full_disk(limit_bytes: int) -> tuple[list[str], list[str]]:
    """Sync in a process whose files may have `limit_bytes`; return the words of both sides, and what was left."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_fill_the_disk, args=(theirs, limit_bytes), daemon=True)
    process.start()
    assert ours.poll(60.0)
    answer = cast("tuple[list[str], list[str]]", ours.recv())
    process.join(30.0)
    return answer


def _fill_the_disk(pipe: Connection, limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    side = ThreadReceiver(DiskBackend, "r0")
    source = ListSource({"small": torch.ones(10), "large": torch.ones(limit_bytes)})
    session = Session(DiskBackend, source, [side], bucket_bytes=4096)
    with session:
        running = side.start(session.plan, 30.0)
        ends = [session.send(30.0).end(), running.end()]
    root = folder_of(session.plan).parent
    assert all(isinstance(end.error, WeightSyncError) for end in ends)
    pipe.send(([str(end.error) for end in ends], [path.name for path in root.iterdir()]))


def receiver_at(folder: str, scope: str, limit_s: float) -> BaseException | None:
    """Receive from a sender that says it is at `folder` in another `scope`; return what became of it."""
    side = ThreadReceiver(DiskBackend, "r0")
    source = ListSource(WEIGHTS)
    mine = side.prepare("elsewhere", 0)
    sender = replace(mine, owner="trainer", address={**mine.address, "folder": folder, "scope": scope})
    plan = plan_of(source, "elsewhere", sender, [mine])
    error = side.start(plan, limit_s).end().error
    side.close()
    return error
