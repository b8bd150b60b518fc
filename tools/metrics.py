"""Makes METRICS.md from the table of metrics: ``python tools/metrics.py [--write]``; without it, only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from verl_trainers.core.metric_table import render

PAGE = Path(__file__).resolve().parents[1] / "packages" / "verl-trainers" / "METRICS.md"


def main(arguments: list[str]) -> int:
    """Write the page, or return 1 when it differs."""
    if "--write" in arguments:
        PAGE.write_text(render(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != render():
        print(
            f"{PAGE.name} is not what the table says; write it with: python tools/metrics.py --write", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
