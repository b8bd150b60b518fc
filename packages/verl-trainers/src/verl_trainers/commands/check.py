"""`verl-train check`: everything that can be known to be wrong before anything is started."""

# ruff: noqa: T201  a command prints
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl_trainers.commands.arguments import add_recipe_arguments, out_folder, print_config, source_file

if TYPE_CHECKING:
    import argparse

    from verl_trainers.commands.arguments import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(commands: Subparsers) -> None:
    """Add `check`."""
    text = "check everything that can be checked, and start nothing"
    parser = commands.add_parser("check", help=text, description=f"{text.capitalize()}.")
    add_recipe_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check, and print every finding: what is true to standard output, what is wrong to standard error."""
    if options.print_config:
        return print_config(options)
    source = source_file(options)

    from verl_trainers.preflight import preflight_file, wants_color

    report = preflight_file(source, options.overrides, run_dir=str(out_folder(options, source)))
    for line in report.facts(color=wants_color(sys.stdout)):
        print(line)
    for line in report.problems(color=wants_color(sys.stderr)):
        print(line, file=sys.stderr)
    return report.exit_code
