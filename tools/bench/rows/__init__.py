"""All claims, in the order in which they are measured: quick ones first.

A module imports what it measures inside of `measure`, so that listing claims costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.rows import embedded, orchestration, shm, starts, trainers, vllm

if TYPE_CHECKING:
    from bench.core import Benchmark

__all__ = ["BENCHMARKS"]

BENCHMARKS: tuple[Benchmark, ...] = (
    *starts.BENCHMARKS,
    *shm.BENCHMARKS,
    *embedded.BENCHMARKS,
    *orchestration.BENCHMARKS,
    *trainers.BENCHMARKS,
    *vllm.BENCHMARKS,
)
