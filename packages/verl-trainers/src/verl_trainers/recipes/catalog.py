"""Which recipes are shipped, and what the head of each file says of it.

A recipe opens with comments: what it is, then ``needs:`` and ``last run:`` lines, so that one file holds all there is
to know of it. Importing this is cheap; nothing is parsed as YAML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from verl_contracts.errors import ConfigError

__all__ = ["RECIPES", "Recipe", "find_recipe", "read_recipe", "recipe_names", "recipes"]

RECIPES = Path(__file__).parent
"""Folder of the shipped recipes."""

_FIELD = re.compile(r"# (what|needs|last run): (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe, as its head describes it."""

    name: str
    path: Path
    what: str
    needs: str
    """Hardware, models and extras."""
    last_run: str
    """Day, machine and figures of the last run from start to end; ``never`` before the first."""


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(recipe: str) -> Path | None:
    """Return the file of a shipped recipe, or the file of that path; None when there is neither."""
    for path in (RECIPES / f"{recipe}.yaml", Path(recipe)):
        if path.is_file():
            return path
    return None


def read_recipe(path: Path) -> Recipe:
    """Return what the head of the file says. Raises `ConfigError` when it leaves something out."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if (match := _FIELD.fullmatch(line)) is not None:
            found[match[1]] = match[2]
    missing = [name for name in ("what", "needs", "last run") if name not in found]
    if missing:
        raise ConfigError(f"{path}: the comments at its head lack {', '.join(f'`# {name}: …`' for name in missing)}")
    return Recipe(name=path.stem, path=path, what=found["what"], needs=found["needs"], last_run=found["last run"])


def recipes() -> list[Recipe]:
    """Return all shipped recipes, by name."""
    return [read_recipe(RECIPES / f"{name}.yaml") for name in recipe_names()]
