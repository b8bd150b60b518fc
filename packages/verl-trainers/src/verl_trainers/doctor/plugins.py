"""Every installed plug-in, loaded and compared with its contract, and the true reason where that fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import PluginError
from verl_contracts.plugins import FAMILIES, available, load_plugin

if TYPE_CHECKING:
    import importlib.metadata
    from collections.abc import Sequence

    from verl_contracts.plugins import Family

_TAIL = re.compile(r" \(process \d+\)|; usable here: [^;]*$")
"""Parts of a message that tell nothing where all plug-ins are listed."""

__all__ = ["PluginRow", "family_names", "inspect_plugins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRow:
    """One entry point."""

    family: str
    name: str
    path: str
    """Class path."""
    distribution: str
    """Name and version of the distribution that offers it."""
    problem: str | None
    """Why it cannot be used; None when it can."""


def family_names() -> list[str]:
    """Return the names of all families."""
    return [family.name for family in FAMILIES.values()]


def inspect_plugins(family: str | None = None) -> list[PluginRow]:
    """Load every plug-in of one family, or of all for None. Costs their imports, which take seconds."""
    return [
        row
        for found in FAMILIES.values()
        if family in (None, found.name)
        for name, entries in available(found).items()
        for row in _rows(found, name, entries)
    ]


def _rows(family: Family[object], name: str, entries: Sequence[importlib.metadata.EntryPoint]) -> list[PluginRow]:
    problem = _problem(family, name)
    return [
        PluginRow(family=family.name, name=name, path=entry.value, distribution=_owner(entry), problem=problem)
        for entry in entries
    ]


def _problem(family: Family[object], name: str) -> str | None:
    try:
        load_plugin(family, name, key=family.key)
    except PluginError as exc:
        return _TAIL.sub("", str(exc).removeprefix(f"{family.key}: "))
    except SystemExit as exc:  # raised by the plug-in's module while it is imported
        return f"importing it ended the process (SystemExit: {exc.code})"
    return None


def _owner(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.metadata['Name']} {entry.dist.version}" if entry.dist is not None else "?"
