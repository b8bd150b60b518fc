"""All claims, in the order in which they are measured: quick ones first.

A module imports what it measures inside of `measure`, so that listing claims costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.rows import embedded, orchestration, starts, trainers, updates, vllm, vllm_updates, weights

if TYPE_CHECKING:
    from bench.core import Benchmark

__all__ = ["BENCHMARKS", "NEED_VLLM"]

NEED_VLLM: tuple[Benchmark, ...] = (*vllm.BENCHMARKS, *vllm_updates.BENCHMARKS, *updates.NEED_VLLM)
"""Those that an environment without vLLM leaves out."""

BENCHMARKS: tuple[Benchmark, ...] = (
    *starts.BENCHMARKS,
    *weights.BENCHMARKS,
    *updates.BENCHMARKS,
    *embedded.BENCHMARKS,
    *orchestration.BENCHMARKS,
    *trainers.BENCHMARKS,
    *NEED_VLLM,
)
