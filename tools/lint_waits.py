"""Refuses waits without a limit.

A run that hangs silently is the failure this prevents: whoever waits must be able to say until when. The rule looks at
leaves, the calls that block until somebody else acts, and asks each for a limit: a `timeout` argument, an enclosing
`asyncio.timeout`, or `bounded` / `asyncio.wait_for` around it. Awaiting an ordinary coroutine is no leaf, and short
mutexes taken by `with lock:` are not waits on another party.

A wait that must stay is waived on its own line with the reason: ``# wait: ends when the parent does``. A waiver
without a reason, or where nothing is refused, is refused too. Tests and suites of the conformance kit are not read:
pytest limits each of them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from wait_rules import Finding, WaitVisitor

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIVER = re.compile(r"#\s*wait:(?P<reason>.*)$")
MIN_REASON = 8
TEST_FOLDERS = frozenset({"tests", "suites"})


def _waivers(source: str) -> dict[int, str]:
    """Return line → reason of each waiver."""
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := WAIVER.match(token.string)):
            found[token.start[0]] = match["reason"].strip()
    return found


def check_source(source: str) -> list[Finding]:
    """Return what is wrong with one module, in the order of its lines."""
    tree = ast.parse(source)
    visitor = WaitVisitor(tree)
    visitor.visit(tree)
    waivers = _waivers(source)
    used: set[int] = set()
    findings: list[Finding] = []
    for finding in visitor.findings:
        lines = [line for line in range(finding.line, finding.end_line + 1) if line in waivers]
        used.update(lines)
        if not lines:
            findings.append(finding)
    for line, reason in waivers.items():
        if len(reason) < MIN_REASON:
            findings.append(Finding(line=line, end_line=line, text="a waiver must say why, as in '# wait: <reason>'"))
        elif line not in used:
            findings.append(Finding(line=line, end_line=line, text="this waiver waives nothing; remove it"))
    return sorted(findings)


def python_files(arguments: list[str]) -> Iterator[Path]:
    """Yield the Python files named, and those in the folders named, tests left out."""
    for argument in map(Path, arguments):
        if argument.is_dir():
            yield from sorted(path for path in argument.rglob("*.py") if not TEST_FOLDERS & set(path.parts))
        elif argument.is_file():
            yield argument
        else:
            raise SystemExit(f"{argument}: no such file or folder")


def main(arguments: list[str]) -> int:
    """Check the files and folders named; return 1 when something is refused."""
    count = 0
    wrong = 0
    for path in python_files(arguments):
        count += 1
        for finding in check_source(path.read_text(encoding="utf-8")):
            print(f"{path}:{finding.line}: {finding.text}", file=sys.stderr)
            wrong += 1
    if not wrong:
        print(f"ok: {count} files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
