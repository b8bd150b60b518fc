"""What several commands take, and the exit codes that all of them share.

Imported before the arguments are known, so nothing heavy may be imported here.
"""

# ruff: noqa: T201  a command prints
from __future__ import annotations

import difflib
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from verl_contracts.errors import ConfigError
from verl_trainers.recipes.catalog import find_recipe, recipe_names

if TYPE_CHECKING:
    import argparse

    Subparsers: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
    """Where a command adds its parser."""

__all__ = [
    "FAILED",
    "FINE",
    "INTERRUPTED",
    "REFUSED",
    "add_recipe_arguments",
    "out_folder",
    "print_config",
    "source_file",
]

FINE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe, overrides and the run folder."""
    parser.add_argument("recipe", metavar="RECIPE|FILE", help="name of a shipped recipe, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the recipe")
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/RECIPE-TIME)")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every key with its value and where that came from, and do nothing else",
    )


def print_config(options: argparse.Namespace) -> int:
    """Print the resolved configuration as YAML that can be run. Raises `ConfigError` with all its mistakes."""
    from verl_trainers.config.load import resolve_config
    from verl_trainers.config.show import render_with_sources

    source = source_file(options)
    out = str(out_folder(options, source))
    print(render_with_sources(resolve_config(source, options.overrides, run_dir=out), run_dir=out), end="")
    return FINE


def source_file(options: argparse.Namespace) -> Path:
    """Return the file of the recipe that was asked for. Raises `ConfigError` when there is none."""
    source = find_recipe(options.recipe)
    if source is None:
        if Path(options.recipe).is_dir():
            raise ConfigError(f"{options.recipe}: is a folder; give a YAML file in it")
        near = difflib.get_close_matches(options.recipe, recipe_names(), n=1)
        advice = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no recipe or file {options.recipe!r}; {advice}recipes: {', '.join(recipe_names())}")
    return source


def out_folder(options: argparse.Namespace, source: Path) -> Path:
    """Return the run folder, as an absolute path."""
    return Path(options.out or f"runs/{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
