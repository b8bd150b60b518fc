"""What the type checker must refuse, and what it must let pass.

The files in ``typing/`` are read by mypy only. A line that ends in ``# E: code`` must be refused with this code, and no
other line may be.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "typing"
FILES = sorted(FOLDER.glob("*.py"))
EXPECTED = re.compile(r"# E: (?P<codes>[\w-]+(?:, [\w-]+)*)$")
REPORTED = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)  \[(?P<code>[\w-]+)\]$")


def expected(path: Path) -> list[tuple[int, str]]:
    """Return line and code of every error that `path` asks for."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return [
        (number, code)
        for number, line in lines
        if (match := EXPECTED.search(line))
        for code in match["codes"].split(", ")
    ]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[tuple[int, str]]]:
    """Run mypy once over all files; return path → line and code of its errors."""
    cache = tmp_path_factory.mktemp("mypy")
    options = ["--config-file", str(FOLDER / "mypy.ini"), "--cache-dir", str(cache), "--no-pretty", "--no-color-output"]
    command = [sys.executable, "-m", "mypy", *options, *(path.name for path in FILES)]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=110, check=False)
    if result.returncode not in (0, 1):
        pytest.fail(f"mypy could not run ({result.returncode}):\n{result.stdout}{result.stderr}")
    found: dict[Path, list[tuple[int, str]]] = {path: [] for path in FILES}
    for line in result.stdout.splitlines():
        if match := REPORTED.match(line):
            found[FOLDER / match["file"]].append((int(match["line"]), match["code"]))
    return found


def test_expected_finds_every_mark() -> None:
    marks = sum(path.read_text(encoding="utf-8").count("# E:") for path in FILES)
    assert marks > 0
    assert sum(len(expected(path)) for path in FILES) >= marks


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mypy_refuses_exactly_the_marked_lines(path: Path, reported: dict[Path, list[tuple[int, str]]]) -> None:
    assert reported[path] == expected(path)
