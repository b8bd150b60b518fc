"""Every installed plug-in, loaded and compared with its contract, and the true reason where that fails."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import FAMILIES, available, check_options, families, load_plugin
from verl_contracts.plugins.finding import find_class
from verl_contracts.training import Placement
from verl_trainers.config.placing import check_servers
from verl_trainers.config.plugins import usable
from verl_trainers.config.schema import ActorRolloutRefConfig, RolloutConfig, RunConfig
from verl_trainers.convert.settings import ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_contracts.plugins import Family

KEY = "plug-in"
"""Stands for the config key in messages, since none names a plug-in here."""
ENGINE_KEY = "actor_rollout_ref.rollout.name"
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
    """Return the names of all families; one that a package keeps to itself is called by its entry-point group."""
    return [*(family.name for family in FAMILIES.values()), *_private_groups()]


def inspect_plugins(family: str | None = None) -> list[PluginRow]:
    """Load every plug-in of one family, or of all for None. Costs their imports, which take seconds.

    Trackers are built as well, which begins nothing by contract, and is where they miss their library.
    Those of a family that a package keeps to itself are imported only: their contract is not known here. Of an engine
    the LLM server manager says whether it could serve, since vLLM is imported by replicas alone.
    """
    rows = [
        row
        for found in FAMILIES.values()
        if family in (None, found.name)
        for name, entries in available(found).items()
        for row in _rows(found.name, entries, partial(_load, found, name))
    ]
    for group in _private_groups():
        if family in (None, group):
            for entry in importlib.metadata.entry_points(group=group):
                rows += _rows(group, [entry], partial(_find, group, entry))
    return rows


def _load(family: Family[object], name: str) -> type:
    cls: type = load_plugin(family, name, key=KEY)
    if family.group != families.TRACKER.group:
        return cls
    try:
        check_options(cls, {}, key=KEY)
    except ConfigError:  # it cannot be built without options, which only a run has
        return cls
    try:
        cls()
    except ConfigError:
        raise
    except Exception as exc:
        raise ConfigError(f"building it raises {type(exc).__name__}: {exc}") from exc
    return cls


def _find(group: str, entry: importlib.metadata.EntryPoint) -> type:
    cls: type = find_class(entry.value, key=KEY, distribution=entry.dist)
    if group == ENGINES:
        _ask_of_engine(entry.name)
    return cls


def _ask_of_engine(name: str) -> None:
    """Raise `ConfigError` with what the default LLM server manager has against the engine itself, if anything."""
    servers = usable(families.LLM_SERVER_MANAGER, None)
    if servers is None:
        return
    config = RunConfig(actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(name=name)))
    wrong = check_servers(config, Placement(trainer_devices=1, hybrid=True), servers)
    for mistake in wrong:
        if mistake.key == ENGINE_KEY:
            raise ConfigError(mistake.text)


def _private_groups() -> list[str]:
    groups = {str(group) for group in importlib.metadata.entry_points().groups}
    return sorted(group for group in groups if group.startswith("verl_") and group not in FAMILIES)


def _rows(family: str, entries: Sequence[importlib.metadata.EntryPoint], load: Callable[[], type]) -> list[PluginRow]:
    problem = _problem(load)
    return [
        PluginRow(family=family, name=entry.name, path=entry.value, distribution=_owner(entry), problem=problem)
        for entry in entries
    ]


def _problem(load: Callable[[], type]) -> str | None:
    try:
        load()
    except ConfigError as exc:
        return _TAIL.sub("", str(exc).removeprefix(f"{KEY}: "))
    except SystemExit as exc:  # raised by the plug-in itself
        return f"loading it ended the process (SystemExit: {exc.code})"
    return None


def _owner(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.metadata['Name']} {entry.dist.version}" if entry.dist is not None else "?"
