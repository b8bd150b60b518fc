"""Print how fast the shm backend moves a model, as a ratio to a plain memory copy. Run it as a script.

Baseline and transfer alternate, five times each; the figures are medians. A copy is torch's, in one thread, between
buffers whose pages exist. The receivers are processes of their own that copy every tensor into memory that exists, as
an engine does. The transfer includes digests on both sides. The first one, which makes the ring, is told
apart. On a machine that others use, the wall-clock ratio says little; the CPU time of the busiest process, waiting
included, is what it could be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
from ckpt_transport import CLOCK, DictSource, new_session

from verl_ckpt_engine.planner import SingleHostPlanner
from verl_ckpt_engine.shm import ShmReceiver, ShmSender
from verl_contracts.clock import Deadline
from verl_contracts.weights import LoadReport

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

    from verl_contracts.weights import TensorMeta

MIB = 1024 * 1024


def model(layers: int) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors with the shapes of SmolLM2-135M, for 30 layers 269 MB."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (49152, 576)}
    for layer in range(layers):
        for name, shape in (
            ("q", (576, 576)),
            ("k", (192, 576)),
            ("v", (192, 576)),
            ("o", (576, 576)),
            ("gate", (1536, 576)),
            ("up", (1536, 576)),
            ("down", (576, 1536)),
            ("norm1", (576,)),
            ("norm2", (576,)),
        ):
            shapes[f"layers.{layer}.{name}"] = shape
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


class InPlaceTarget:
    """Copies into tensors that exist, as an engine does."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Copy everything."""
        for meta, tensor in items:
            self._weights[meta.name].copy_(tensor)
        return LoadReport(loaded=tuple(self._weights))


def serve(pipe: Connection, owner: str, layers: int) -> None:
    """Receive as often as the driver says."""
    torch.set_num_threads(1)
    target = InPlaceTarget({name: torch.ones_like(tensor) for name, tensor in model(layers).items()})
    receiver = ShmReceiver(owner=owner, clock=CLOCK)
    while (session := pipe.recv()) is not None:
        pipe.send(receiver.prepare(session=session, rank=0))
        plan = pipe.recv()
        begun = time.process_time()
        receiver.receive(plan, target, deadline=Deadline.after(CLOCK, 60))
        receiver.close()
        pipe.send(time.process_time() - begun)


def main() -> None:
    """Measure and print one row per number of receivers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--bucket-mib", type=int, nargs="*", default=[32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = DictSource(model(args.layers))
    manifest = source.manifest(1)
    plain = {name: torch.ones_like(tensor) for name, tensor in source.weights.items()}
    context = multiprocessing.get_context("spawn")
    for count in args.receivers:
        pipes, children = [], []
        for index in range(count):
            ours, theirs = context.Pipe()
            child = context.Process(target=serve, args=(theirs, f"r{index}", args.layers), daemon=True)
            child.start()
            pipes.append(ours)
            children.append(child)
        sender = ShmSender(owner="trainer", rank=0, clock=CLOCK)
        for bucket in args.bucket_mib:
            copies, moves, busiest = [], [], []
            for _ in range(args.repeats + 1):
                begun = time.perf_counter()
                for name, tensor in source.weights.items():
                    plain[name].copy_(tensor)
                copies.append(time.perf_counter() - begun)
                session = new_session()
                for pipe in pipes:
                    pipe.send(session)
                receivers = [pipe.recv() for pipe in pipes]
                begun, begun_cpu = time.perf_counter(), time.process_time()
                plan = SingleHostPlanner().plan(
                    manifest,
                    session=session,
                    senders=[sender.prepare(manifest, session=session)],
                    receivers=receivers,
                    bucket_bytes=bucket * MIB,
                )
                for pipe in pipes:
                    pipe.send(plan)
                sender.send(plan, source, deadline=Deadline.after(CLOCK, 60))
                moves.append(time.perf_counter() - begun)
                sender.close()
                busiest.append(max(time.process_time() - begun_cpu, *(pipe.recv() for pipe in pipes)))
            copy, move, busy = (statistics.median(row[1:]) for row in (copies, moves, busiest))
            sys.stdout.write(
                f"{count} receiver(s), bucket {bucket} MiB, {manifest.num_bytes / 1e6:.0f} MB: "
                f"{move * 1e3:.1f} ms, {manifest.num_bytes / move / 1e9:.2f} GB/s, "
                f"memcpy {manifest.num_bytes / copy / 1e9:.2f} GB/s, ratio {copy / move:.2f}; "
                f"first {moves[0] * 1e3:.1f} ms; busiest process {busy * 1e3:.1f} ms of CPU\n"
            )
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join(10)


if __name__ == "__main__":
    main()
