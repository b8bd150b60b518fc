"""Other ways to move the same bytes to another process: what the weight backends are compared with."""

from __future__ import annotations

import logging
import multiprocessing
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

from bench.core import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    import torch
    from torch.distributed import Store, Work  # type: ignore[attr-defined]

__all__ = ["broadcast_process", "ray_receiver"]

LIMIT_S = 60.0


@contextmanager
def broadcast_process(num_bytes: int, piece: int) -> Iterator[Callable[[], float]]:
    """Broadcast by gloo from one block of memory into another."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_take, args=(theirs, store.port, num_bytes, piece), daemon=True)
    child.start()
    try:
        move = _mover(store, 0, num_bytes, piece)
        memory = torch.ones(num_bytes, dtype=torch.uint8)

        def once() -> float:
            begun = time.perf_counter()
            ours.send("go")
            move(memory)
            _heard(ours)
            return num_bytes / (time.perf_counter() - begun)

        yield once
        ours.send(None)
        child.join(LIMIT_S)
    finally:
        child.kill()


def _take(pipe: Connection, port: int, num_bytes: int, piece: int) -> None:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    move = _mover(TCPStore("127.0.0.1", port, is_master=False), 1, num_bytes, piece)
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    while pipe.recv() is not None:  # wait: a daemon, which ends with its parent
        move(memory)
        pipe.send("done")


def _mover(store: Store, rank: int, num_bytes: int, piece: int) -> Callable[[torch.Tensor], None]:
    from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=LIMIT_S)
    group = cast("_Group", ProcessGroupGloo(PrefixStore("bench", store), rank, 2, options))
    how = BroadcastOptions()
    how.rootRank = 0

    def move(memory: torch.Tensor) -> None:
        under_way = []
        for first in range(0, num_bytes, piece):
            under_way.append(group.broadcast([memory[first : first + piece]], how))
            if len(under_way) == 2:
                under_way.pop(0).wait(timedelta(seconds=LIMIT_S))
        for work in under_way:
            work.wait(timedelta(seconds=LIMIT_S))

    return move


class _Group(Protocol):
    """What torch's stubs do not tell of a process group of gloo."""

    def broadcast(self, tensors: list[torch.Tensor], options: object, /) -> Work:
        """Begin one."""
        ...


def _heard(pipe: Connection) -> object:
    if not pipe.poll(LIMIT_S):
        raise BenchError(f"the other process said nothing for {LIMIT_S:g} s")
    return pipe.recv()


@contextmanager
def ray_receiver(num_bytes: int, piece: int) -> Iterator[Callable[[], float]]:
    """Put the state dict into Ray's object store, and get it in an actor; `piece` does not matter."""
    import ray

    from verl_ckpt_engine.bench.payload import make_weights

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=4 * num_bytes)
    try:
        source = make_weights(num_bytes, seed=1)
        actor = ray.remote(num_cpus=0)(_Engine).remote(num_bytes)
        load: Callable[..., ray.ObjectRef[int]] = actor.load.remote  # type: ignore[attr-defined]
        size = source.manifest(0).num_bytes

        def once() -> float:
            begun = time.perf_counter()
            ray.get(load(ray.put(source.held)), timeout=LIMIT_S)
            return size / (time.perf_counter() - begun)

        yield once
    finally:
        ray.shutdown()


class _Engine:
    def __init__(self, num_bytes: int) -> None:
        import torch

        from verl_ckpt_engine.bench.payload import make_weights

        torch.set_num_threads(1)
        self._weights = make_weights(num_bytes, seed=2)

    def load(self, state: dict[str, torch.Tensor]) -> int:
        for name, tensor in state.items():
            self._weights.held[name].copy_(tensor)
        return len(state)
