"""Writes the README's table of measured claims from the bench's results, or checks that it is in step with them.

    python tools/bench_table.py --write
    python tools/bench_table.py            what `lint` does: exit code 1 when README and results differ

Needs only the standard library. A claim without a result is shown as one.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.results import RESULTS, read_report
from bench.rows import BENCHMARKS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.core import Benchmark, Row

BEGIN = "<!-- bench: made by tools/bench_table.py -->"
END = "<!-- bench: end -->"
TIMES = "\N{MULTIPLICATION SIGN}"
HEAD = ("| claim | figure | quartiles | target | |", "|---|---|---|---|---|")


def table(benchmarks: Sequence[Benchmark], results: Path) -> str:
    """Return the table, and where it was measured. Raises ValueError for a results file that belongs to no claim."""
    lines = list(HEAD)
    made: dict[str, None] = {}
    stray = {path.stem for path in results.glob("*.json")} - {benchmark.name for benchmark in benchmarks}
    if stray:
        raise ValueError(f"{results} holds results of no claim: {', '.join(sorted(stray))}; remove them")
    for benchmark in benchmarks:
        path = results / f"{benchmark.name}.json"
        if not path.exists():
            lines.append(f"| `{benchmark.name}` | not measured yet | | {benchmark.target} | |")
            continue
        report, (claim, *_) = read_report(path)
        lines.append(line(claim, benchmark))
        made[f"{report['date']} ({report['machine']}; commit {report['commit']})"] = None
    if made:
        lines += ["", "Measured " + ", ".join(made) + "."]
    return "\n".join(lines)


def line(claim: Row, benchmark: Benchmark) -> str:
    """Return one row. Targets are those of today's code, not those that the results file saw."""
    unit = TIMES if claim.baseline is not None else claim.unit
    spread = f"{short(claim.spread[0])} … {short(claim.spread[1])}"
    verdict = "met" if benchmark.target.met_by(claim.figure) else "**missed**"
    return f"| `{claim.name}` | {short(claim.figure)} {unit} | {spread} | {benchmark.target} | {verdict} |"


def short(figure: float) -> str:
    """Return a figure with as many digits as its spread lets one believe."""
    return f"{figure:.0f}" if abs(figure) >= 20 else f"{figure:.2g}" if abs(figure) < 0.1 else f"{figure:.2f}"


def replaced(readme: str, text: str) -> str:
    """Return `readme` with `text` between the marks. Raises ValueError when they are not there once."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise ValueError(f"README.md must hold {BEGIN} … {END} once")
    return pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", readme)


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Keep the README's table in step with the bench's results.")
    parser.add_argument("--write", action="store_true", help="write the table; without it, only compare")
    parser.add_argument("--readme", type=Path, default=Path(__file__).resolve().parents[1] / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        before = options.readme.read_text(encoding="utf-8")
        after = replaced(before, table(BENCHMARKS, options.results))
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 1
    if options.write:
        options.readme.write_text(after, encoding="utf-8")
    elif after != before:
        print("README.md and tools/bench/results differ; run: python tools/bench_table.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
