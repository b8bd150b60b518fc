"""Figures on disk: one file per claim, complete or not there, with the machine and the versions that made it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bench.core import Row, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RESULTS", "Report", "describe_machine", "read_report", "write_report"]

RESULTS = Path(__file__).with_name("results")
DISTRIBUTIONS = (
    *("verl-contracts", "verl-runtime", "verl-rollout", "verl-ckpt-engine", "verl-trainers"),
    *("torch", "transformers", "ray", "trl"),
)

Report = dict[str, object]
"""``machine``, ``versions``, ``date``, ``commit``, ``load``, ``rows``."""


def describe_machine() -> Report:
    """Return where and with what figures are made: everything of a report but its rows.

    ``load`` is the number of processes that wanted a core in the minute before: more than a little of it, and figures
    say something about the neighbours too.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {_processor()}, {memory:.0f} GiB",
        "versions": {"python": platform.python_version(), **_versions()},
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2),
    }


def write_report(path: Path, machine: Report, rows: Sequence[Row]) -> None:
    """Write one claim's figures; a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    report = {**machine, "rows": [_to_json(row) for row in rows]}
    partial.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_report(path: Path) -> tuple[Report, tuple[Row, ...]]:
    """Return what `write_report` wrote. Raises ValueError for a file that it did not write."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return report, tuple(_from_json(row) for row in report["rows"])
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"{path} is not a file of the bench: {type(exc).__name__}: {exc}") from exc


def _to_json(row: Row) -> dict[str, object]:
    fields: dict[str, object] = {"name": row.name, ("value" if row.baseline is None else "ratio"): _rounded(row.figure)}
    optional = {"unit": row.unit, "baseline": row.baseline, "target": row.target and str(row.target)}
    fields |= {name: value for name, value in optional.items() if value}
    fields |= {"spread": [_rounded(value) for value in row.spread], "count": row.count}
    fields |= {"settings": row.settings} if row.settings else {}
    return fields | {"leaves_out": row.leaves_out}


def _from_json(fields: dict[str, object]) -> Row:
    baseline, target, spread = fields.get("baseline"), fields.get("target"), cast("list[float]", fields["spread"])
    return Row(
        name=str(fields["name"]),
        figure=float(cast("float", fields["value" if baseline is None else "ratio"])),
        spread=(float(spread[0]), float(spread[1])),
        count=int(cast("int", fields["count"])),
        leaves_out=str(fields["leaves_out"]),
        baseline=None if baseline is None else str(baseline),
        unit=str(fields.get("unit", "")),
        target=None if target is None else Target.parse(str(target)),
        settings=str(fields.get("settings", "")),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def _commit() -> str:
    """Return the commit that was measured, with a mark when files differ from it; empty outside of a clone."""
    root = str(Path(__file__).resolve().parents[2])
    git = ["git", "-C", root]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, timeout=30
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!tools/bench/results"],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
