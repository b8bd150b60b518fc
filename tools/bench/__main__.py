"""The command: measures claims and keeps their figures.

    tools/nox -s bench                            all of it; the machine should be quiet
    tools/nox -s bench -- --list                  what there is
    tools/nox -s bench -- --row cli_help_ms       one claim
    tools/nox -s bench -- --row NAME --pairs 1    a try; nothing is written
    tools/nox -s bench-vllm                       those that need vLLM

Figures go to `results/` one file per claim, and only when the claim is measured completely, with enough pairs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core import BenchError, Conditions
from bench.results import RESULTS, describe_machine, write_report
from bench.rows import BENCHMARKS, NEED_VLLM
from bench.vllm_serving import installed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.core import Benchmark, Row

ENOUGH = 5
"""Pairs from which figures are kept."""
QUIET = 0.5
"""Load of a machine that does nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns 1 when a claim could not be measured; a target that is missed is no failure."""
    options = _parse(arguments)
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if options.list:
        for benchmark in BENCHMARKS:
            print(f"{benchmark.name:34} {benchmark.target!s:>8}  {benchmark.baseline or ''}")
        return 0
    machine = describe_machine()
    print(f"{machine['machine']}; load {machine['load']}")
    if os.getloadavg()[0] > QUIET:
        print(f"this machine is busy (load {os.getloadavg()[0]:.2f}): figures will be worse and wider than they are")
    failed = 0
    for name in options.row or _measurable():
        try:
            rows = _measure(by_name[name], options.pairs, options.smollm2)
        except Exception as exc:  # whatever it was: the claims that follow have nothing to do with it
            failed += 1
            print(f"{name}: not measured: {type(exc).__name__}: {exc}", file=sys.stderr)
            if not isinstance(exc, BenchError):
                traceback.print_exc()
            continue
        if options.pairs >= ENOUGH:
            write_report(options.out / f"{name}.json", {**machine, "load": round(os.getloadavg()[0], 2)}, rows)
    if options.pairs < ENOUGH:
        print(f"nothing was written: {options.pairs} pairs are fewer than {ENOUGH}")
    return 1 if failed else 0


def _measurable() -> list[str]:
    """Return all claims but those of an engine that is not installed here; what is left out is said."""
    left_out = [] if installed() else [benchmark.name for benchmark in NEED_VLLM]
    if left_out:
        print(f"left out, for they need vLLM (tools/nox -s bench-vllm): {', '.join(left_out)}")
    return [benchmark.name for benchmark in BENCHMARKS if benchmark.name not in left_out]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Measure what this repository claims about speed.")
    parser.add_argument("--list", action="store_true", help="show all rows with target and baseline, and measure none")
    parser.add_argument(
        "--row", action="append", choices=[benchmark.name for benchmark in BENCHMARKS], help="may be given repeatedly"
    )
    parser.add_argument("--pairs", type=int, default=ENOUGH, help=f"at least {ENOUGH} for figures that are kept")
    parser.add_argument(
        "--smollm2",
        type=Path,
        default=Path(os.environ.get("VERL_SMOLLM2", "models/smollm2")),
        help="folder made by tools/make_smollm2.py; VERL_SMOLLM2 is the default, then models/smollm2",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the figures")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {options.pairs}")
    return options


def _measure(benchmark: Benchmark, pairs: int, smollm2: Path) -> tuple[Row, ...]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows = benchmark.measure(Conditions(pairs=pairs, folder=Path(folder), smollm2=smollm2))
    if not rows or rows[0].name != benchmark.name:
        raise BenchError(f"the first row should be {benchmark.name}, got {[row.name for row in rows]}")
    print(f"\n{benchmark.name} ({time.monotonic() - begun:.0f} s)")
    for row in rows:
        print(f"  {show(row)}")
    return rows


def show(row: Row) -> str:
    """Return one line for a terminal."""
    unit = "x" if row.baseline is not None else row.unit
    target = "" if row.target is None else f"  {row.target}: {'met' if row.target.met_by(row.figure) else 'MISSED'}"
    return f"{row.name:70} {row.figure:9.4g} {unit:9} ({row.spread[0]:.4g} … {row.spread[1]:.4g}, {row.count}){target}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
