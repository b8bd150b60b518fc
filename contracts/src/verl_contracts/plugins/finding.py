"""From a class path to the class, with one line that says what is wrong when there is none.

Owns importing, and telling "there is no such module" from "the module exists and needs something that is absent":
the second is hidden by most loaders, and is the one that users cannot guess.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import re
import sys
from typing import TYPE_CHECKING

from verl_contracts.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution
    from types import ModuleType

__all__ = ["find_class", "nearest", "where"]


_REALLY_NEAR = 0.8
"""How much of an installed module's name must agree: there are hundreds, and few of them were meant."""


def where(role: str | None) -> str:
    """Return how messages name this process."""
    return f"process {os.getpid()}, {role}" if role else f"process {os.getpid()}"


def nearest(name: str, candidates: Iterable[str], *, alike: float = 0.6) -> str:
    """Return ``"; nearest: 'x', 'y'"`` for names that agree with `name` by the share `alike`, or the empty string."""
    known = list(candidates)
    close = difflib.get_close_matches(name, known, n=3, cutoff=alike)
    close = close or [candidate for candidate in known if candidate.lower() == name.lower()]
    return f"; nearest: {', '.join(repr(match) for match in close)}" if close else ""


def find_class(path: str, *, key: str, role: str | None = None, distribution: Distribution | None = None) -> type:
    """Import the class at ``package.module.Class`` or ``package.module:Outer.Inner``.

    `key` is the config key that named it and `role` the process, both for messages; `distribution` is asked for the
    extra that would bring a missing module, and looked up when None. Raises `PluginError`.
    """
    module_name, separator, attributes = path.partition(":")
    if not separator:
        module_name, _, attributes = path.rpartition(".")
    if not all(part.isidentifier() for part in [*module_name.split("."), *attributes.split(".")]):
        raise PluginError(
            f"{key}: {path!r} is no class path; write package.module.Class or package.module:Class ({where(role)})"
        )
    module = _import(module_name, path, key=key, role=role, distribution=distribution)
    found: object = module
    at = module_name
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise PluginError(
                f"{key}: {path!r} not found: {at!r} has no attribute {attribute!r}{nearest(attribute, names)} "
                f"({where(role)})"
            )
        found = getattr(found, attribute)
        at = f"{at}.{attribute}" if found is not module else at
    if not isinstance(found, type):
        raise PluginError(f"{key}: {path!r} is {found!r:.80}, not a class ({where(role)})")
    return found


def _import(name: str, path: str, *, key: str, role: str | None, distribution: Distribution | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        missing = exc.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise PluginError(
                f"{key}: {path!r} not found: no module {missing!r}{_near_modules(missing)}{_colon_hint(name, path)} "
                f"({where(role)}{f', {_searched()}' if '.' not in missing else ''})"
            ) from exc
        fix = _extra_for(missing, name, distribution)
        raise PluginError(
            f"{key}: {path!r} needs module {missing!r}, which is not installed; {fix} ({where(role)})"
        ) from exc
    except Exception as exc:
        raise PluginError(
            f"{key}: importing {name!r} for {path!r} failed: {type(exc).__name__}: {exc} ({where(role)})"
        ) from exc


def _near_modules(missing: str) -> str:
    """Name modules like `missing`: those beside it in its package, else those of this folder, else installed ones."""
    parent, _, leaf = missing.rpartition(".")
    if parent:
        search = getattr(sys.modules.get(parent), "__path__", None)
        return "" if search is None else nearest(leaf, _modules(search)).replace("'", f"'{parent}.", 1)
    here = _modules([_here()]) if _searches_here() else []
    return nearest(leaf, here) or nearest(leaf, set(_modules(None)) - sys.stdlib_module_names, alike=_REALLY_NEAR)


def _modules(search: Iterable[str] | None) -> list[str]:
    return [info.name for info in pkgutil.iter_modules(search) if not info.name.startswith("_")]


def _here() -> str:
    return os.path.realpath(os.curdir)


def _searches_here() -> bool:
    return any(os.path.realpath(folder) == _here() for folder in sys.path)


def _searched() -> str:
    if _searches_here():
        return f"searched: the current folder {_here()} and what is installed"
    return f"searched: what is installed, and not the current folder {_here()}"


def _colon_hint(module_name: str, path: str) -> str:
    parent, _, attribute = module_name.rpartition(".")
    if ":" not in path and hasattr(sys.modules.get(parent), attribute):
        return f"; {parent!r} is a module, so write {parent}:{path[len(parent) + 1 :]}"
    return ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _extra_for(missing: str, module: str, distribution: Distribution | None) -> str:
    """Say what to install for `missing`: the extra of the plug-in's distribution that mentions it, if there is one."""
    top = _normal(missing.partition(".")[0])
    if distribution is None:
        from importlib import metadata  # here, because it takes as long to import as half of the contracts

        owners = metadata.packages_distributions().get(module.partition(".")[0], [])
        distribution = metadata.distribution(owners[0]) if owners else None
    if distribution is not None:
        for requirement in distribution.requires or ():
            wanted, _, marker = requirement.partition(";")
            extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", marker)
            name = re.match(r"\s*([A-Za-z0-9._-]+)", wanted)
            if extra is not None and name is not None and _mentions(_normal(name[1]), top):
                return f"run: pip install '{distribution.metadata['Name']}[{extra[1]}]'"
    return f"run: pip install {top}"


def _mentions(requirement: str, module: str) -> bool:
    return requirement == module or requirement.startswith(f"{module}-") or module.startswith(f"{requirement}-")
