"""Loading one plug-in: find, import, contract version, members, constructor; each with its own message.

Done first in the driver before anything is placed, and again in every process that needs the class. Importing this
module is cheap: installed distributions are read only when a name must be resolved.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar, cast

from verl_contracts.errors import ContractVersionError, PluginError
from verl_contracts.plugins.checking import constructor_problems, protocol_problems
from verl_contracts.plugins.finding import find_class, nearest, where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.metadata import EntryPoint

    from verl_contracts.plugins.families import Family

__all__ = ["available", "check_plugin", "load_plugin"]

P = TypeVar("P")


def available(family: Family[P]) -> Mapping[str, Sequence[EntryPoint]]:
    """Return name → entry points of that name, in order of name; more than one means that the name is contested."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in _entries(family.group):
        found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def _entries(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of `group`. Raises `PluginError` naming a distribution whose file cannot be read."""
    from importlib import metadata  # here, because it takes as long to import as half of the contracts

    try:
        return metadata.entry_points(group=group)
    except Exception as exc:  # whatever the reader makes of a malformed file; it does not say whose
        for distribution in metadata.distributions():
            try:
                distribution.entry_points.select(group=group)
            except Exception:
                folder = distribution.locate_file("")
                raise PluginError(
                    f"entry_points.txt of {distribution.name} in {folder} is malformed, so no plug-in can be found; "
                    "install that distribution again, or remove it"
                ) from exc
        raise


def load_plugin(family: Family[P], spec: str, *, key: str, role: str | None = None) -> type[P]:
    """Return the class that `spec` names, checked against its family's contract.

    `spec` is an entry-point name, ``package.module.Class`` or ``package.module:Outer.Inner``; `key` is the config key
    it came from and `role` the process, both for messages. Raises `PluginError` that lists everything that is wrong,
    and `ContractVersionError` for a class that was written for a contract that is not installed.
    """
    names = available(family)
    if spec in names:
        entry = _only(names[spec], family, key=key)
        try:
            cls = find_class(entry.value, key=key, role=role, distribution=entry.dist)
        except PluginError as exc:
            raise PluginError(f"{exc}{_usable(family, names, besides=spec)}") from exc.__cause__
    elif "." in spec or ":" in spec:
        cls = find_class(spec, key=key, role=role)
    else:
        listed = ", ".join(repr(name) for name in names) or "none"
        what = f"no {family.name} is called {spec!r}" if spec else f"names no {family.name}"
        raise PluginError(
            f"{key}: {what}{nearest(spec, names)}; available: {listed}. "
            f"Install the package that offers it, or write package.module.Class ({where(role)})"
        )
    check_plugin(family, cls, key=key, role=role)
    return cast("type[P]", cls)


def check_plugin(family: Family[P], cls: type, *, key: str, role: str | None = None) -> None:
    """Check `cls` against the contract of `family`. Raises as `load_plugin` does."""
    _check_version(family, cls, key=key, role=role)
    problems = protocol_problems(cls, family.protocol)
    if family.arguments is not None:
        problems += constructor_problems(cls, family.arguments)
    for part in family.parts:
        inner = getattr(cls, part.attribute, None)
        if inner is None:
            continue  # missing, and reported as such
        if not isinstance(inner, type):
            problems.append(f"{part.attribute}: is {inner!r:.80}, not a class")
            continue
        found = protocol_problems(inner, part.protocol) + constructor_problems(inner, part.arguments)
        problems += [f"{part.attribute} {inner.__qualname__}: {problem}" for problem in found]
    if problems:
        lines = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        raise PluginError(
            f"{key}: {cls.__module__}:{cls.__qualname__} does not meet the contract {family.protocol.__name__} "
            f"{family.contract_version} ({where(role)}): {lines}"
        )


def _only(entries: Sequence[EntryPoint], family: Family[P], *, key: str) -> EntryPoint:
    if len(entries) > 1:
        owners = "; ".join(f"{entry.dist.metadata['Name'] if entry.dist else '?'} ({entry.value})" for entry in entries)
        raise PluginError(
            f"{key}: the {family.name} name {entries[0].name!r} is offered more than once, by {owners}. "
            "Uninstall one of them, or write the class path"
        )
    return entries[0]


def _usable(family: Family[P], names: Mapping[str, Sequence[EntryPoint]], *, besides: str) -> str:
    """Say which other plug-ins of the family can be imported here. Costs their imports; only errors ask."""
    usable: list[str] = []
    for name, entries in names.items():
        try:
            if name != besides:
                find_class(entries[0].value, key=family.key)
                usable.append(repr(name))
        except PluginError:  # not usable, which is what was asked
            continue
    return f"; usable here: {', '.join(usable) or 'none'}"


def _check_version(family: Family[P], cls: type, *, key: str, role: str | None) -> None:
    wanted = getattr(cls, "contract_version", None)
    if wanted is None:
        return
    parsed = re.fullmatch(r"(\d+)\.(\d+)", wanted) if isinstance(wanted, str) else None
    who = f"{key}: {cls.__module__}:{cls.__qualname__}"
    if parsed is None:
        raise ContractVersionError(f"{who} has contract_version {wanted!r}; write 'major.minor' ({where(role)})")
    major, minor = (int(part) for part in family.contract_version.split("."))
    if int(parsed[1]) != major or int(parsed[2]) > minor:
        newer = (int(parsed[1]), int(parsed[2])) > (major, minor)
        fix = "upgrade verl-contracts" if newer else "upgrade the plug-in, or install an older verl-contracts"
        raise ContractVersionError(
            f"{who} wants {family.protocol.__name__} {wanted}, and {family.contract_version} is installed: the major "
            f"must be equal and the minor at least that; {fix} ({where(role)})"
        )
