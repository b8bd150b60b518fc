"""`verl-train plugins`: which plug-ins are installed, who brought them, and whether they can be used."""

# ruff: noqa: T201  a command prints
from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_trainers.commands.arguments import FINE
from verl_trainers.commands.table import table

if TYPE_CHECKING:
    import argparse

    from verl_trainers.commands.arguments import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(commands: Subparsers) -> None:
    """Add `plugins`."""
    text = "list the installed plug-ins, and why one cannot be used"
    parser = commands.add_parser("plugins", help=text, description=f"{text.capitalize()}.")
    parser.add_argument("--family", metavar="FAMILY", help="only one family, for example 'tracker'")


def run(options: argparse.Namespace) -> int:
    """Load each plug-in, and print what came of it. Raises `ConfigError` for a family that there is not."""
    from verl_trainers.doctor.plugins import family_names, inspect_plugins

    if options.family is not None and options.family not in family_names():
        raise ConfigError(f"--family: no family {options.family!r}; families: {', '.join(family_names())}")
    rows = [
        (row.family, row.name, row.path, row.distribution, row.problem or "can be used")
        for row in inspect_plugins(options.family)
    ]
    print("\n".join(table(("family", "name", "class", "from", "state"), rows)))
    return FINE
