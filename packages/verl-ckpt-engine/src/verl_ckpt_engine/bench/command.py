"""`verl-ckpt-bench`: a table of how fast backends move weights on this machine, against a plain copy of the same."""

# ruff: noqa: T201  a command prints

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from verl_ckpt_engine.bench.payload import make_weights
from verl_ckpt_engine.bench.syncing import Case, Syncs
from verl_contracts.errors import VerlError
from verl_contracts.plugins import available, families
from verl_contracts.weights import Verification

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_ckpt_engine.bench.payload import Weights
    from verl_ckpt_engine.bench.syncing import Timing

__all__ = ["main"]

_MIB = 1024 * 1024
_HEADER = ("backend", "receivers", "verification", "GB/s each", "of a copy", "spread", "first s", "extra MiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a backend could not be measured."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    print(
        f"{options.megabytes} MB in buckets of {options.bucket_megabytes} MiB, {options.rounds} rounds a row, "
        f"each after one plain copy of the same tensors by one thread"
    )
    print(_line(_HEADER))
    failed, rows = 0, []
    for name in options.backend or ["shm"]:
        for receivers in options.receivers:
            case = Case(
                backend=name,
                receivers=receivers,
                num_bytes=options.megabytes * 1_000_000,
                bucket_bytes=options.bucket_megabytes * _MIB,
                verification=options.verification,
            )
            try:
                row = measure(case, rounds=options.rounds)
            except (VerlError, RuntimeError, OSError) as exc:
                failed += 1
                print(f"{name} to {receivers}: {exc}", file=sys.stderr)
                continue
            rows.append(row)
            print(_line(_cells(case, row)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def measure(case: Case, *, rounds: int) -> dict[str, object]:
    """Return the figures of one row; each round is a copy and a transfer, and the first transfer is kept apart."""
    copies: list[float] = []
    timings: list[Timing] = []
    with Syncs.open(case) as syncs:
        twin = make_weights(case.num_bytes, seed=3)
        first = syncs.run()
        for _ in range(rounds):
            copies.append(_copy(syncs.source, twin))
            timings.append(syncs.run())
    ratios = sorted(timing.speed / copy for timing, copy in zip(timings, copies, strict=True))
    return {
        **asdict(case),
        "gb_per_s": statistics.median(timing.speed for timing in timings) / 1e9,
        "ratio_to_copy": statistics.median(ratios),
        "spread": (ratios[0], ratios[-1]),
        "first_s": first.seconds,
        "sender_extra_bytes": first.sender_extra,
        "receiver_extra_bytes": first.receiver_extra,
    }


def _copy(source: Weights, target: Weights) -> float:
    """Return bytes per second."""
    begun = time.perf_counter()
    for name, tensor in source.held.items():
        target.held[name].copy_(tensor)
    return source.manifest(0).num_bytes / (time.perf_counter() - begun)


def _cells(case: Case, row: dict[str, object]) -> tuple[str, ...]:
    spread = row["spread"]
    low, high = spread if isinstance(spread, tuple) else (0.0, 0.0)
    extra = f"{int(str(row['sender_extra_bytes'])) / _MIB:.0f} + {int(str(row['receiver_extra_bytes'])) / _MIB:.0f}"
    figures = (f"{row['gb_per_s']:.2f}", f"{row['ratio_to_copy']:.2f}", f"{low:.2f} … {high:.2f}")
    return (case.backend, str(case.receivers), case.verification, *figures, f"{row['first_s']:.2f}", extra)


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:12} " + " ".join(f"{cell:>13}" for cell in cells[1:])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verl-ckpt-bench",
        description="Measure how fast weights move from one process to others on this machine.",
        epilog="of a copy: the speed to each receiver over that of the copy; extra MiB is the most memory beyond the "
        "weights in the first transfer, of the sender and of a receiver.",
    )
    names = ", ".join(available(families.WEIGHT_BACKEND))
    parser.add_argument("--backend", action="append", help=f"may be given repeatedly; installed: {names}; default shm")
    parser.add_argument("--receivers", type=_counts, default=[1], help="processes, as 1,2,4; default 1")
    parser.add_argument("--megabytes", type=_count, default=269, help="size of the weights; default 269")
    parser.add_argument("--bucket-megabytes", type=_count, default=32, help="in MiB; default 32")
    parser.add_argument("--verification", choices=get_args(Verification), default="full")
    parser.add_argument("--rounds", type=_count, default=5, help="default 5")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
