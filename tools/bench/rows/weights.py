"""Moving weights between processes of this machine, against what moves the same bytes without any promise.

A receiver is a process of its own that copies every tensor into memory that exists, as an engine does. What is timed is
a whole transfer as a sync makes it: preparing and planning, both digests, and the receivers' last words. Digests are
compared each time, so a fast wrong transfer is no figure.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from bench.core import Row, Target
from bench.rows.bare_transfers import broadcast_process, ray_receiver
from bench.turns import middle, ratios, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from bench.core import Benchmark, Conditions
    from verl_ckpt_engine.bench.payload import Weights
    from verl_ckpt_engine.bench.syncing import Syncs

__all__ = ["BENCHMARKS"]

SMALL = 269_000_000
"""Bytes of SmolLM2-135M in bfloat16."""
LARGE = 2_000_000_000
BUCKET_MIB = 32
ROUNDS = 3
"""Transfers after the first of each fresh pair of sender and receivers."""
LEAVES_OUT = "pausing and resuming replicas, gathering shards, and the remote calls of a whole sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersusCopy:
    """Bytes per second to all receivers together, over those of one copy."""

    name: str
    target: Target
    receivers: int
    num_bytes: int
    backend: str = "shm"
    baseline: str | None = "one thread copying the same tensors into memory that exists, by torch"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Each pair begins with fresh receivers and a fresh sender, whose first sync is kept apart."""
        from verl_ckpt_engine.bench.payload import make_weights
        from verl_ckpt_engine.bench.syncing import Case, Syncs

        case = Case(backend=self.backend, receivers=self.receivers, num_bytes=self.num_bytes)
        first: list[float] = []
        steady: dict[str, list[float]] = {"copy": [], "sync": []}
        twin = make_weights(self.num_bytes, seed=3)
        with _one_thread():
            for _ in range(conditions.pairs):
                with Syncs.open(case) as syncs:
                    sides = {"copy": partial(_copy, syncs.source, twin), "sync": partial(_speed, syncs, self.receivers)}
                    begin = take_turns(sides, rounds=1)
                    first += ratios(begin["sync"], begin["copy"])
                    for side, speeds in take_turns(sides, rounds=ROUNDS).items():
                        steady[side] += speeds
        settings = (
            f"{self.num_bytes / 1e6:.0f} MB of bfloat16, buckets of {BUCKET_MIB} MiB, 1 sender, {self.receivers} "
            "receivers in processes of their own, one thread each, digests on both sides; all receivers together"
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
            leaves_out=LEAVES_OUT,
        )
        figure, spread = middle(first)
        beginning = Row(
            name=f"{self.name}/first_sync",
            figure=figure,
            spread=spread,
            count=len(first),
            baseline=self.baseline,
            settings="the first sync of a sender and its receivers; memory is touched for the first time",
            leaves_out=LEAVES_OUT,
        )
        return claim, beginning, *(_plain(f"{self.name}/{side}", speeds) for side, speeds in steady.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class VersusBare:
    """Bytes per second to one receiver, over those of another way to another process."""

    name: str
    target: Target
    backend: str
    other: Callable[[int, int], AbstractContextManager[Callable[[], float]]]
    """Given size and bucket in bytes, starts the other process; each call moves all and returns bytes per second."""
    baseline: str | None
    settings: str

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Both keep their processes; the first transfer of each is left out."""
        from verl_ckpt_engine.bench.syncing import Case, Syncs

        case = Case(backend=self.backend, num_bytes=SMALL, bucket_bytes=BUCKET_MIB << 20)
        with _one_thread(), Syncs.open(case) as syncs, self.other(SMALL, BUCKET_MIB << 20) as other:
            sides: dict[str, Callable[[], float]] = {"other": other, "sync": partial(_speed, syncs, 1)}
            take_turns(sides, rounds=1)
            speeds = take_turns(sides, rounds=max(5, conditions.pairs * ROUNDS))
        figure, spread = middle(ratios(speeds["sync"], speeds["other"]))
        claim = Row(
            name=self.name,
            figure=figure,
            spread=spread,
            count=len(speeds["sync"]),
            baseline=self.baseline,
            target=self.target,
            settings=self.settings,
            leaves_out=LEAVES_OUT,
        )
        return claim, *(_plain(f"{self.name}/{side}", found) for side, found in speeds.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationCost:
    """Time that digests add to a transfer to one receiver, as a share of the time without."""

    name: str
    target: Target
    verification: Literal["full", "sampled"]
    baseline: str | None = "the same transfer with a digest that reads nothing, on both sides"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Both keep their processes; the first transfer of each is left out."""
        from verl_ckpt_engine.bench.syncing import Case, Syncs

        case = Case(backend="shm", num_bytes=SMALL, verification=self.verification)
        bare = Case(backend="shm", num_bytes=SMALL, hashes=False)
        with _one_thread(), Syncs.open(case) as syncs, Syncs.open(bare) as without:
            sides = {"with": partial(_seconds, syncs), "without": partial(_seconds, without)}
            take_turns(sides, rounds=1)
            seconds = take_turns(sides, rounds=max(5, conditions.pairs * ROUNDS))
        shares = [mine / other - 1.0 for mine, other in zip(seconds["with"], seconds["without"], strict=True)]
        figure, spread = middle(shares)
        return (
            Row(
                name=self.name,
                figure=figure,
                spread=spread,
                count=len(shares),
                baseline=self.baseline,
                target=self.target,
                settings=f"shm, {SMALL / 1e6:.0f} MB of bfloat16 to 1 receiver, digests: {self.verification}",
                leaves_out=LEAVES_OUT,
            ),
        )


class _one_thread:  # noqa: N801  used as a function
    """Lets torch compute on one thread."""

    def __enter__(self) -> None:
        import torch

        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_num_threads(self._before)


def _copy(source: Weights, target: Weights) -> float:
    begun = time.perf_counter()
    for name, tensor in source.held.items():
        target.held[name].copy_(tensor)
    return source.manifest(0).num_bytes / (time.perf_counter() - begun)


def _speed(syncs: Syncs, receivers: int) -> float:
    return syncs.run().speed * receivers


def _seconds(syncs: Syncs) -> float:
    return syncs.run().seconds


def _plain(name: str, speeds: list[float]) -> Row:
    figure, spread = middle([speed / 1e9 for speed in speeds])
    return Row(name=name, figure=figure, spread=spread, count=len(speeds), unit="GB/s", leaves_out="see the claim")


_CORES = f"{len(os.sched_getaffinity(0))} cores"
BENCHMARKS: tuple[Benchmark, ...] = (
    VersusCopy(name="shm_1_receiver_vs_memcpy", target=Target(limit=0.6), receivers=1, num_bytes=SMALL),
    VersusCopy(name="shm_4_receivers_vs_memcpy", target=Target(limit=1.0), receivers=4, num_bytes=SMALL),
    VersusCopy(name="shm_1_receiver_vs_memcpy_2gb", target=Target(limit=0.6), receivers=1, num_bytes=LARGE),
    VersusCopy(name="shm_4_receivers_vs_memcpy_2gb", target=Target(limit=1.0), receivers=4, num_bytes=LARGE),
    VerificationCost(name="full_verification_cost", target=Target(limit=0.35, at_least=False), verification="full"),
    VerificationCost(
        name="sampled_verification_cost", target=Target(limit=0.05, at_least=False), verification="sampled"
    ),
    VersusBare(
        name="gloo_vs_bare_broadcast",
        target=Target(limit=0.95),
        backend="gloo",
        other=broadcast_process,
        baseline="torch.distributed's broadcast of the same bytes from memory to memory, two pieces under way",
        settings=f"{SMALL / 1e6:.0f} MB to one process in pieces of {BUCKET_MIB} MiB; ours copies out of and into "
        "tensors and makes digests on both sides, the other does neither",
    ),
    VersusBare(
        name="shm_vs_ray_put",
        target=Target(limit=3.0),
        backend="shm",
        other=ray_receiver,
        baseline="ray.put of the state dict, ray.get in an actor, which copies it into tensors that exist",
        settings=f"{SMALL / 1e6:.0f} MB to one process",
    ),
)
