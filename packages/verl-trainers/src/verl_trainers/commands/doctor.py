"""`verl-train doctor`: what is installed and what is needed, what the machine has, and how to fix what is wrong.

Exit codes: 0 nothing must be fixed; 1 something must.
"""

# ruff: noqa: T201  a command prints
from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from verl_trainers.commands.arguments import FAILED, FINE
from verl_trainers.commands.table import table

if TYPE_CHECKING:
    import argparse

    from verl_trainers.commands.arguments import Subparsers
    from verl_trainers.doctor.report import Diagnosis

__all__ = ["add_parser", "render_diagnosis", "run"]


def add_parser(commands: Subparsers) -> None:
    """Add `doctor`."""
    text = "compare what is installed with what is needed"
    parser = commands.add_parser("doctor", help=text, description=f"{text.capitalize()}; exit code 1 on a fault.")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Examine this environment and print what was found."""
    from verl_trainers.doctor.report import diagnose

    found = diagnose()
    if options.json:
        print(json.dumps({"fine": not found.must_fix, **dataclasses.asdict(found)}, indent=2))
    else:
        print("\n".join(render_diagnosis(found)))
    return FAILED if found.must_fix else FINE


def render_diagnosis(found: Diagnosis) -> list[str]:
    """Return what was found as lines: three tables, what must be fixed, and what is worth knowing."""
    software = [(row.name, row.found or "-", row.needed or "any", row.state) for row in found.software]
    contracts = [(row.family, row.version, ", ".join(row.usable) or "none") for row in found.contracts]
    lines = [
        *table(("software", "installed", "needed", "state"), software),
        "",
        *table(("contract", "version", "plug-ins that can be used"), contracts),
        "",
        *table(("machine", "found"), [(row.name, row.value) for row in found.machine]),
    ]
    for head, texts in (("must be fixed", found.must_fix), ("worth knowing", found.advice)):
        if texts:
            lines += ["", f"{head}:", *(f"  {text}" for text in texts)]
    return [*lines, "", "nothing must be fixed" if not found.must_fix else f"{len(found.must_fix)} must be fixed"]
