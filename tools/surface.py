"""Compares the contracts with the snapshot of their surface that is checked in.

A new member, and a new keyword even with a default, break those who implement a Protocol, and neither breaks a test
here. So each line of the surface is written down, and a change of it is a line in the diff of the change that made it.
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "contracts" / "src" / "verl_contracts"
SNAPSHOT = ROOT / "contracts" / "surface.txt"
UPDATE = "tools/nox -s surface -- --write"


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a function's signature on one line, with its decorators in front."""
    decorators = "".join(f"@{ast.unparse(each)} " for each in function.decorator_list)
    kind = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{decorators}{kind} {function.name}({ast.unparse(function.args)}){returns}"


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the public members of a class, in the order of the source."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if not statement.name.startswith("_") or statement.name in ("__init__", "__len__", "__call__"):
                yield signature(statement)
        elif isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            yield ast.unparse(statement)


def surface(family: str, module: ast.Module) -> Iterator[str]:
    """Yield what a module offers: functions, classes with their members, constants and type names."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield f"{family}: {signature(node)}"
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"{family}: class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
            yield from (f"{family}.{node.name}: {member}" for member in members(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not ast.unparse(target).startswith("_"):
                yield f"{family}: {ast.unparse(node)}"


def describe(source: Path) -> str:
    """Return the surface of all families, one line for each thing that somebody may depend on."""
    families = [path for path in sorted(source.glob("*.py")) if not path.name.startswith("_")]
    lines = [line for path in families for line in surface(path.stem, ast.parse(path.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Compare, or write with ``--write``; return 1 when the surface changed."""
    present = describe(SOURCE)
    if arguments == ["--write"]:
        SNAPSHOT.write_text(present, encoding="utf-8")
        return 0
    recorded = SNAPSHOT.read_text(encoding="utf-8")
    if present == recorded:
        print(f"ok: {len(present.splitlines())} lines")
        return 0
    difference = difflib.unified_diff(recorded.splitlines(), present.splitlines(), "recorded", "present", "", "", 0, "")
    print("\n".join(difference), file=sys.stderr)
    print(f"the surface of the contracts changed; if that is meant, run: {UPDATE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
