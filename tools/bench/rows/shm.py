"""Weights through shared memory against a plain copy of the same bytes.

The receiver is a process of its own that copies every tensor into memory that exists, as an engine does. What is timed
is a whole transfer as a sync makes it: preparing and planning, both digests, and the receiver's last word. Digests of
both sides are compared each time, so a fast wrong transfer is no figure.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.core import BenchError, Row, Target
from bench.turns import middle, ratios, take_turns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection

    import torch

    from bench.core import Benchmark, Conditions
    from verl_contracts.weights import LoadReport, Manifest, TensorMeta, WeightSender, WeightSource, WeightTarget

__all__ = ["BENCHMARKS"]

LIMIT_S = 60.0
BUCKET_BYTES = 32 * 1024 * 1024
SYNCS_PER_PAIR = 3
LAYERS = 30
LAYER = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
    "input_layernorm": (576,),
    "post_attention_layernorm": (576,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (49152, 576),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in LAYER.items()},
    "model.norm.weight": (576,),
}
"""Those of SmolLM2-135M."""


class Weights:
    """Tensors as a trainer offers them and as an engine takes them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.held = tensors

    def manifest(self, version: int, /) -> Manifest:
        """Describe them."""
        from verl_contracts.weights import Manifest

        size = sum(tensor.numel() * tensor.element_size() for tensor in self.held.values())
        return Manifest(version=version, tensors=tuple(meta for meta, _ in self.tensors()), num_bytes=size)

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield them."""
        from verl_contracts.weights import TensorMeta

        for name, tensor in self.held.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield TensorMeta(name=name, shape=tuple(tensor.shape), dtype=dtype), tensor

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Copy everything in."""
        from verl_contracts.weights import LoadReport

        for meta, tensor in items:
            self.held[meta.name].copy_(tensor)
        return LoadReport(loaded=tuple(self.held))


def make_weights(*, seed: int) -> dict[str, torch.Tensor]:
    """Return 269 MB of bfloat16 in the shapes of SmolLM2-135M, their pages touched."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def serve(pipe: Connection) -> None:
    """Be the receiver: for each session that comes in, say where, take the plan, receive, and send the digests."""
    import torch

    from verl_ckpt_engine.shm import ShmReceiver
    from verl_contracts.clock import Deadline, SystemClock

    torch.set_num_threads(1)
    clock = SystemClock()
    target = Weights(make_weights(seed=2))
    receiver = ShmReceiver(owner="replica", clock=clock)
    pipe.send("ready")
    while (session := pipe.recv()) is not None:  # wait: a daemon, which ends with its parent
        pipe.send(receiver.prepare(session=session, rank=0))
        report = receiver.receive(pipe.recv(), target, deadline=Deadline.after(clock, LIMIT_S))  # wait: as above
        receiver.close()
        pipe.send(dict(report.digests))


@contextmanager
def receiver_process() -> Iterator[Connection]:
    """Yield the pipe to a fresh receiver."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,), daemon=True)
    child.start()
    try:
        _answer(ours)
        yield ours
        ours.send(None)
        child.join(LIMIT_S)
    finally:
        child.kill()


def _answer(pipe: Connection) -> object:
    if not pipe.poll(LIMIT_S):
        raise BenchError(f"the receiving process said nothing for {LIMIT_S:g} s")
    return pipe.recv()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneReceiver:
    """Bytes per second through the ring to one receiver, over those of a copy."""

    name: str
    target: Target
    baseline: str | None = "one thread copying the same tensors into memory that exists, by torch"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Each pair begins with a fresh receiver and a fresh sender, whose first sync is kept apart."""
        import torch

        from verl_ckpt_engine.shm import ShmSender
        from verl_contracts.clock import SystemClock

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        source, twin = Weights(make_weights(seed=1)), Weights(make_weights(seed=3))
        size = source.manifest(0).num_bytes
        first: list[float] = []
        steady: dict[str, list[float]] = {"copy": [], "sync": []}
        try:
            for _ in range(conditions.pairs):
                sender = ShmSender(owner="trainer", rank=0, clock=SystemClock())
                with receiver_process() as pipe:
                    sides = {"copy": partial(_copy, source, twin), "sync": partial(_sync, sender, source, pipe)}
                    begin = take_turns(sides, rounds=1)
                    first += ratios(begin["sync"], begin["copy"])
                    for name, speeds in take_turns(sides, rounds=SYNCS_PER_PAIR).items():
                        steady[name] += speeds
        finally:
            torch.set_num_threads(threads)
        return self._rows(size, first, steady)

    def _rows(self, size: int, first: list[float], steady: dict[str, list[float]]) -> tuple[Row, ...]:
        settings = (
            f"{size / 1e6:.0f} MB of bfloat16 in {len(SHAPES)} tensors, buckets of {BUCKET_BYTES >> 20} MiB, "
            "1 sender, 1 receiver in a process of its own, one thread each, digests on both sides"
        )
        figure, spread = middle(ratios(steady["sync"], steady["copy"]))
        claim = Row(
            name=self.name,
            figure=figure,
            spread=spread,
            count=len(steady["sync"]),
            baseline=self.baseline,
            target=self.target,
            settings=settings,
            leaves_out="pausing and resuming the replica, gathering shards, and the remote calls of a whole sync",
        )
        figure, spread = middle(first)
        beginning = Row(
            name=f"{self.name}/first_sync",
            figure=figure,
            spread=spread,
            count=len(first),
            baseline=self.baseline,
            settings="the first sync of a sender and a receiver; pages of the ring are touched for the first time",
            leaves_out=claim.leaves_out,
        )
        return claim, beginning, *(_speed(f"{self.name}/{side}", speeds) for side, speeds in steady.items())


def _speed(name: str, speeds: list[float]) -> Row:
    figure, spread = middle([speed / 1e9 for speed in speeds])
    return Row(name=name, figure=figure, spread=spread, count=len(speeds), unit="GB/s", leaves_out="see the claim")


def _copy(source: Weights, target: Weights) -> float:
    begun = time.perf_counter()
    for name, tensor in source.held.items():
        target.held[name].copy_(tensor)
    return source.manifest(0).num_bytes / (time.perf_counter() - begun)


def _sync(sender: WeightSender, source: Weights, pipe: Connection) -> float:
    from verl_ckpt_engine.shm import ShmBackend
    from verl_contracts.clock import Deadline, SystemClock
    from verl_contracts.weights import EndpointInfo

    manifest = source.manifest(1)
    session = f"bench-{os.getpid()}-{uuid.uuid4().hex[:12]}"
    begun = time.perf_counter()
    pipe.send(session)
    receiver = _answer(pipe)
    if not isinstance(receiver, EndpointInfo):
        raise BenchError(f"the receiving process answered {receiver!r}")
    mine = sender.prepare(manifest, session=session)
    plan = ShmBackend.planner_class().plan(
        manifest, session=session, senders=[mine], receivers=[receiver], bucket_bytes=BUCKET_BYTES
    )
    pipe.send(plan)
    report = sender.send(plan, source, deadline=Deadline.after(SystemClock(), LIMIT_S))
    digests = _answer(pipe)
    seconds = time.perf_counter() - begun
    sender.close()
    if digests != dict(report.digests):
        raise BenchError("digests of sender and receiver differ")
    return manifest.num_bytes / seconds


BENCHMARKS: tuple[Benchmark, ...] = (OneReceiver(name="shm_1_receiver_vs_memcpy", target=Target(limit=0.6)),)

if TYPE_CHECKING:

    def _is_source(x: Weights) -> WeightSource:
        return x

    def _is_target(x: Weights) -> WeightTarget:
        return x
