"""Senders and replicas in processes of their own, which meet a fault where they are told to.

A side answers over a pipe. `Fault.at` is one of its calls (``prepare``, ``transfer``, ``commit`` …), met before it is
done, or the number of a tensor, from 1. Processes come from a server that has torch loaded already.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from ckpt_hosts import ThreadReplica
from ckpt_transport import CLOCK, DictSource, DictTarget, sample_weights

from verl_ckpt_engine.disk import FOLDER_VARIABLE
from verl_contracts.clock import Deadline
from verl_contracts.errors import ActorFailed, WeightSyncError
from verl_contracts.failures import FailureRecord
from verl_contracts.plugins import families, load_plugin
from verl_contracts.testing.tensors import payload_digest
from verl_contracts.weights import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from verl_contracts.rollout import PauseMode
    from verl_contracts.weights import (
        EndpointInfo,
        Manifest,
        Plan,
        TensorMeta,
        TransferReport,
        WeightReceiver,
        WeightReceiverHost,
        WeightSender,
        WeightSenderHost,
    )

Kind: TypeAlias = Literal["dies", "stalls", "late", "raises", "flips", "cuts", "misshapes", "misses"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "ckpt_processes", "verl_ckpt_engine.gloo", "verl_ckpt_engine.shm"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What one side does wrong, once."""

    kind: Kind
    at: str | int


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version: every awkward kind of tensor, and a few buckets more."""
    generator = torch.Generator().manual_seed(1000 + version)
    plain = {f"layer.{number}": torch.randn(40, 301, generator=generator) for number in range(4)}
    return {**sample_weights(version), **plain}


def digests_of(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return name → digest."""
    return {name: payload_digest(tensor) for name, tensor in weights.items()}


class Side:
    """The near end of a process."""

    def __init__(self, serve: Callable[..., None], *arguments: object, name: str) -> None:
        self.name = name
        self.answers = True
        """Whether it can still be asked, as far as its faults go."""
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=serve, args=(theirs, *arguments), daemon=True, name=name)
        self.process.start()
        theirs.close()
        self._ids = itertools.count()
        self._open: dict[int, Future[object]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    async def ask(self, what: str, argument: object = None) -> object:
        """Return the answer; the caller bounds it. Raises `ActorFailed` when the process is gone."""
        number, future = next(self._ids), Future[object]()
        with self._lock:
            self._open[number] = future
            try:
                self._pipe.send((number, what, argument))
            except OSError as exc:
                self._open.pop(number, None)
                raise self._gone() from exc
        return await asyncio.wrap_future(future)

    async def meet(self, fault: Fault) -> None:
        """Let it meet `fault` from now on."""
        await self.ask("fault", fault)
        self.answers = fault.kind not in ("dies", "stalls")

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, answer = self._pipe.recv()
                future = self._open.pop(number, None)
                if future is None or future.cancelled():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        with self._lock:
            left, self._open = list(self._open.values()), {}
        for future in left:
            if not future.done():
                future.set_exception(self._gone())

    def _gone(self) -> ActorFailed:
        return ActorFailed(FailureRecord(role=self.name, rank=0, node="here", cause="killed by signal 9"))

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join(10)
        self._reader.join(10)
        self._pipe.close()


class RemoteSender:
    """A trainer of one rank."""

    def __init__(self, backend: str, root: str) -> None:
        self._backend = backend
        self._root = root
        self.start()

    def start(self) -> None:
        """Begin with a new process."""
        self.side = Side(_serve_sender, self._backend, self._root, name="sender")

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        manifest, endpoint = cast("tuple[Manifest, EndpointInfo]", await self.side.ask("prepare", (version, session)))
        return manifest, [endpoint]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        return [cast("TransferReport", await self.side.ask("transfer", (plan, deadline.remaining(CLOCK))))]

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        await self.side.ask("abort", reason)

    async def close(self, *, deadline: Deadline) -> None:
        await self.side.ask("close")


class RemoteReplica(ThreadReplica):
    """A replica of one rank."""

    def __init__(self, replica_id: str, backend: str) -> None:
        super().__init__(replica_id)
        self.side = Side(_serve_receiver, backend, replica_id, name=replica_id)
        self._remote = _RemoteReceiver(self.side)

    @property
    def receiver_host(self) -> WeightReceiverHost:
        return self._remote

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        await self.side.ask("pause")

    async def resume(self, *, deadline: Deadline) -> None:
        await self.side.ask("resume")

    async def held(self) -> tuple[dict[str, str], bool]:
        """Return name → digest of what was loaded last, and whether it is paused."""
        return cast("tuple[dict[str, str], bool]", await self.side.ask("held"))

    def stop(self) -> None:
        super().stop()
        self.side.stop()


class _RemoteReceiver:
    def __init__(self, side: Side) -> None:
        self._side = side

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        return [cast("EndpointInfo", await self._side.ask("prepare", session))]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        return [cast("TransferReport", await self._side.ask("transfer", (plan, deadline.remaining(CLOCK))))]

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        await self._side.ask("commit")

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        await self._side.ask("abort", reason)

    async def close(self, *, deadline: Deadline) -> None:
        await self._side.ask("close")


class _Script:
    """Meets one fault, once."""

    def __init__(self) -> None:
        self._fault: Fault | None = None

    def set(self, fault: Fault) -> None:
        """Have it met from now on."""
        self._fault = fault
        if (at := self.take("flips")) is not None:
            _flip_a_byte(at)

    def take(self, kind: Kind, /) -> int | None:
        """Return where a fault of the data is met, once."""
        fault = self._fault
        if fault is None or fault.kind != kind:
            return None
        self._fault = None
        return int(fault.at)

    def meet(self, at: str | int) -> None:
        """Do it, if it is here."""
        fault = self._fault
        if fault is None or fault.at != at or fault.kind not in ("dies", "stalls", "late", "raises"):
            return
        self._fault = None
        if fault.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stalls":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1.0)  # a thread may run on for a moment
        elif fault.kind == "late":
            time.sleep(0.4)
        else:
            raise RuntimeError(f"injected at {at}")


class _Source(DictSource):
    """Meets faults at tensors."""

    def __init__(self, script: _Script, version: int) -> None:
        weights = weights_of(version)
        self._script = script
        cut, wrong = script.take("cuts"), script.take("misshapes")
        name = None if wrong is None else list(weights)[wrong - 1]
        changed = {} if name is None else {name: torch.zeros(3, 1)}
        super().__init__(weights, stop_after=None if cut is None else cut - 1, wrong=changed)

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for number, item in enumerate(super().tensors(), start=1):
            self._script.meet(number)
            yield item


class _Target(DictTarget):
    """Meets faults at tensors."""

    def __init__(self, script: _Script) -> None:
        super().__init__()
        self._script = script
        self._missed = script.take("misses")

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        def met() -> Iterator[tuple[TensorMeta, torch.Tensor]]:
            for number, item in enumerate(items, start=1):
                self._script.meet(number)
                yield item

        report = super().load(met())
        if self._missed is None:
            return report
        return replace(report, loaded=(*report.loaded[: self._missed - 1], *report.loaded[self._missed :]))


def _answer(pipe: Connection, calls: dict[str, Callable[[object], object]], script: _Script) -> None:
    """Serve: `abort` at once, everything else one after another."""
    worker, lock = ThreadPoolExecutor(1), threading.Lock()
    calls["fault"] = lambda fault: script.set(cast("Fault", fault))

    def do(number: int, what: str, argument: object) -> None:
        try:
            script.meet(what)
            answer = calls[what](argument)
        except Exception as exc:  # whatever it is, the other end raises it
            answer = exc
        with lock, suppress(OSError):
            pipe.send((number, answer))

    with suppress(EOFError, OSError):
        while True:
            number, what, argument = pipe.recv()
            if what == "abort":
                do(number, what, argument)
            else:
                worker.submit(do, number, what, argument)
    os._exit(0)


def _serve_sender(pipe: Connection, backend: str, root: str) -> None:
    torch.set_num_threads(1)
    os.environ[FOLDER_VARIABLE] = root
    script = _Script()
    found = load_plugin(families.WEIGHT_BACKEND, backend, key="backend")
    sender: WeightSender = found.sender_class(owner="trainer", rank=0, clock=CLOCK)  # type: ignore[call-arg]
    source: list[DictSource] = []

    def prepare(argument: object) -> object:
        version, session = cast("tuple[int, str]", argument)
        source[:] = [_Source(script, version)]
        manifest = DictSource(weights_of(version)).manifest(version)
        return manifest, sender.prepare(manifest, session=session)

    def transfer(argument: object) -> object:
        plan, limit_s = cast("tuple[Plan, float]", argument)
        return sender.send(plan, source[0], deadline=Deadline.after(CLOCK, limit_s))

    calls: dict[str, Callable[[object], object]] = {
        "prepare": prepare,
        "transfer": transfer,
        "abort": lambda reason: sender.abort(str(reason)),
        "close": lambda _: sender.close(),
    }
    _answer(pipe, calls, script)


def _serve_receiver(pipe: Connection, backend: str, owner: str) -> None:
    torch.set_num_threads(1)
    script = _Script()
    found = load_plugin(families.WEIGHT_BACKEND, backend, key="backend")
    receiver: WeightReceiver = found.receiver_class(owner=owner, clock=CLOCK)  # type: ignore[call-arg]
    held: dict[str, torch.Tensor] = {}
    paused = [False]

    def transfer(argument: object) -> object:
        plan, limit_s = cast("tuple[Plan, float]", argument)
        target = _Target(script)
        held.clear()
        try:
            return receiver.receive(plan, target, deadline=Deadline.after(CLOCK, limit_s))
        finally:
            held.update(target.weights)

    def pause(value: bool) -> None:
        paused[0] = value

    calls: dict[str, Callable[[object], object]] = {
        "prepare": lambda session: receiver.prepare(session=str(session), rank=0),
        "transfer": transfer,
        "abort": lambda reason: receiver.abort(str(reason)),
        "close": lambda _: receiver.close(),
        "commit": lambda _: None,
        "pause": lambda _: pause(True),
        "resume": lambda _: pause(False),
        "held": lambda _: (digests_of(held), paused[0]),
    }
    _answer(pipe, calls, script)


def _flip_a_byte(at: int) -> None:
    """Let one bit of what is sent change after it was hashed, in the `at`-th piece that has any."""
    left = [at]

    def wrap(copy: Callable[..., None]) -> Callable[..., None]:
        def copy_and_flip(tensor: torch.Tensor, into: torch.Tensor, *rest: object) -> None:
            copy(tensor, into, *rest)
            if into.numel():
                left[0] -= 1
                if left[0] == 0:
                    into[into.numel() // 2] ^= 4

        return copy_and_flip

    found = [m for name, m in list(sys.modules.items()) if name.startswith("verl_ckpt_engine.") and name.count(".") > 1]
    changed = [module for module in found if hasattr(module, "copy_and_hash")]
    if not changed:
        raise WeightSyncError("transfer", "no module of this backend copies what it sends")
    for module in changed:
        module.copy_and_hash = wrap(module.copy_and_hash)  # type: ignore[attr-defined]


if TYPE_CHECKING:

    def _is_sender(x: RemoteSender) -> WeightSenderHost:
        return x
