"""`verl-train recipes`: which recipes are shipped, and the text of one, to be copied and changed."""

# ruff: noqa: T201  a command prints
from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_trainers.commands.arguments import FINE
from verl_trainers.commands.table import table
from verl_trainers.recipes.catalog import RECIPES, recipe_names, recipes

if TYPE_CHECKING:
    import argparse

    from verl_trainers.commands.arguments import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(commands: Subparsers) -> None:
    """Add `recipes` and `recipes show`."""
    text = "list the shipped recipes, or print one"
    parser = commands.add_parser("recipes", help=text, description=f"{text.capitalize()}.")
    actions = parser.add_subparsers(dest="action", metavar="show")
    show = actions.add_parser("show", help="print a recipe's YAML", description="Print a recipe's YAML.")
    show.add_argument("name", metavar="RECIPE")


def run(options: argparse.Namespace) -> int:
    """Print. Raises `ConfigError` for a recipe that there is not."""
    if options.action == "show":
        if options.name not in recipe_names():
            raise ConfigError(f"no recipe {options.name!r}; recipes: {', '.join(recipe_names())}")
        print((RECIPES / f"{options.name}.yaml").read_text(encoding="utf-8"), end="")
        return FINE
    rows = []
    for recipe in recipes():
        rows += [
            (recipe.name, recipe.what),
            ("", f"needs {recipe.needs}"),
            ("", f"last run: {recipe.last_run}"),
        ]
    print("\n".join(table(("recipe", "what"), rows)))
    return FINE
