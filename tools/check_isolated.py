"""Checks what an environment lacks, and that a package imports completely without it.

Runs under the environment in question, needs the standard library only, and prevents this failure: a package passes
its tests because a sibling or an optional dependency happened to be installed beside it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def importable(names: list[str]) -> list[str]:
    """Return those of `names` that could be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is not None]


def extras_of(package: str) -> set[str]:
    """Return what a message may name to say how `package` is completed, such as ``verl-runtime[ray]``."""
    distribution = package.replace("_", "-")
    extras = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
    return {f"{distribution}[{extra}]" for extra in extras}


def public_modules(package: str) -> list[str]:
    """Return `package` and its modules, found without importing them; private ones and ``__main__`` are left out."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"{package} is not installed as a package in {sys.prefix}")
    found = [package]
    pending = [(package, list(spec.submodule_search_locations))]
    while pending:
        parent, locations = pending.pop()
        for info in pkgutil.iter_modules(locations):
            if info.name.startswith("_"):
                continue
            name = f"{parent}.{info.name}"
            found.append(name)
            if info.ispkg:
                pending.append((name, [f"{location}/{info.name}" for location in locations]))
    return sorted(found)


def import_all(package: str) -> tuple[list[str], list[str]]:
    """Import every public module, load every entry point; return what went wrong, and what asked for an extra."""
    extras = extras_of(package)
    entry_points = importlib.metadata.distribution(package.replace("_", "-")).entry_points
    steps: list[tuple[str, Callable[[], object]]] = [
        *((f"import {name}", partial(importlib.import_module, name)) for name in public_modules(package)),
        *((f"entry point {point.group}: {point.name} = {point.value}", point.load) for point in entry_points),
    ]
    wrong: list[str] = []
    asked: list[str] = []
    for what, step in steps:
        try:
            step()
        except Exception as exc:  # each failure is reported, so that one run shows them all
            named = set(re.findall(r"[\w-]+\[[\w,-]+\]", str(exc))) & extras
            if isinstance(exc, ImportError | ValueError) and named:
                asked.append(f"{what} needs {', '.join(sorted(named))}")
            else:
                wrong.append(f"{what}: {type(exc).__name__}: {exc} (extras it may name: {sorted(extras)})")
    return wrong, asked


def main() -> int:
    """Run the checks; return 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--import-all", metavar="PACKAGE", help="import every public module of it")
    parser.add_argument("--absent", nargs="*", default=[], metavar="MODULE", help="modules that must not be importable")
    options = parser.parse_args()
    wrong = [f"{name} can be imported in {sys.prefix}, and must not be" for name in importable(options.absent)]
    if options.import_all is not None:
        failures, asked = import_all(options.import_all)
        wrong += failures
        for line in asked:
            print(f"note: {line}")
        loaded = [name for name in options.absent if name in sys.modules]
        wrong += [f"importing {options.import_all} put {name} into sys.modules" for name in loaded]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print(f"ok: absent: {', '.join(options.absent)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
