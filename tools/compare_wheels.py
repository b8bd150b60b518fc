"""Checks that wheels can be installed into one environment: no two own the same file or the same command."""

from __future__ import annotations

import configparser
import sys
import zipfile
from itertools import combinations
from pathlib import Path


def owned(wheel: Path) -> set[str]:
    """Return the files that `wheel` installs and the commands that it makes, each as a path in the environment."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/"):
                continue
            top, _, rest = name.partition("/")
            if not top.endswith(".data"):
                found.add(f"site-packages/{name}")
                if top.endswith(".dist-info") and rest == "entry_points.txt":
                    found |= commands(archive.read(name).decode())
                continue
            kind, _, path = rest.partition("/")
            folder = {"purelib": "site-packages", "platlib": "site-packages", "scripts": "bin"}.get(kind, kind)
            found.add(f"{folder}/{path}")
    return found


def commands(entry_points: str) -> set[str]:
    """Return the commands that a wheel's entry points make."""
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # the documented way to keep case
    parser.read_string(entry_points)
    sections = [section for section in ("console_scripts", "gui_scripts") if parser.has_section(section)]
    return {f"bin/{name}" for section in sections for name in parser.options(section)}


def main(arguments: list[str]) -> int:
    """Compare each pair of the wheels named; return 1 when two share something."""
    wheels = {Path(argument).name: owned(Path(argument)) for argument in arguments}
    if len(wheels) < 2:
        print(f"error: two wheels at least are needed, got {arguments}", file=sys.stderr)
        return 2
    wrong = 0
    for (left, left_owns), (right, right_owns) in combinations(wheels.items(), 2):
        for path in sorted(left_owns & right_owns):
            print(f"error: {left} and {right} both own {path}", file=sys.stderr)
            wrong += 1
    if not wrong:
        print("ok: nothing in common: " + ", ".join(f"{name} ({len(owns)} files)" for name, owns in wheels.items()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
