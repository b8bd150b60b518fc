"""Checks what no off-the-shelf linter knows: the shape of this repository.

Source files stay small, each package folder is complete, all packages ask for the same contracts, and nothing names
a folder of the machine that it was written on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 400
TEXT_SUFFIXES = frozenset({".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".cfg", ".ini", ".json", ""})
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users)/[\w./-]+")
REQUIRED_FILES = ("README.md", "CHANGELOG.md", "pyproject.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    path: Path
    text: str
    line: int = 0
    """Line, or 0 for the file as a whole."""

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{where}: {self.text}"


def tracked_files(root: Path) -> list[Path]:
    """Return the files that git tracks, and the new ones that it does not ignore, relative to `root`."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.decode()
    return sorted(path for name in listing.split("\0") if name and (root / (path := Path(name))).is_file())


def package_folders(root: Path) -> list[Path]:
    """Return the folders that hold a distribution, relative to `root`; the contracts come first."""
    return [
        Path("contracts"),
        *sorted(path.relative_to(root) for path in (root / "packages").iterdir() if path.is_dir()),
    ]


def check_sizes(root: Path, files: list[Path]) -> list[Finding]:
    """Refuse source files that are too long to be one thing. Tests may be longer."""
    findings = []
    for path in files:
        if path.suffix == ".py" and "tests" not in path.parts:
            count = len((root / path).read_text(encoding="utf-8").splitlines())
            if count > MAX_LINES:
                findings.append(
                    Finding(path=path, text=f"{count} lines, at most {MAX_LINES}; split it by what it owns")
                )
    return findings


def check_machine_paths(root: Path, files: list[Path]) -> list[Finding]:
    """Refuse paths that exist on one machine only."""
    findings = []
    for path in files:
        if path.suffix not in TEXT_SUFFIXES:
            continue
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), start=1):
            if match := MACHINE_PATH.search(line):
                text = f"{match.group()} names a folder of one machine; write it relative to the repository"
                findings.append(Finding(path=path, line=number, text=text))
    return findings


def check_packages(root: Path) -> list[Finding]:
    """Require the files of each package, and that all ask for one range of the contracts, which theirs satisfies."""
    findings = []
    ranges: dict[str, list[Path]] = {}
    for folder in package_folders(root):
        module = "verl_contracts" if folder == Path("contracts") else folder.name.replace("-", "_")
        required = [*REQUIRED_FILES, f"src/{module}/__init__.py", f"src/{module}/py.typed"]
        missing = [name for name in required if not (root / folder / name).is_file()]
        findings += [Finding(path=folder, text=f"{name} is missing") for name in missing]
        if "pyproject.toml" in missing:
            continue
        project = tomllib.loads((root / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] != module.replace("_", "-"):
            findings.append(
                Finding(path=folder, text=f"distribution {project['name']!r} does not fit module {module!r}")
            )
        wanted = [entry for entry in project.get("dependencies", []) if re.match(r"verl-contracts\b", entry)]
        if module != "verl_contracts":
            ranges.setdefault(wanted[0] if wanted else "nothing", []).append(folder)
        siblings = [entry for entry in all_requirements(project) if re.match(r"verl-(?!contracts\b)[\w-]+", entry)]
        for entry in siblings:
            findings.append(Finding(path=folder / "pyproject.toml", text=f"depends on a sibling: {entry}"))
    if len(ranges) > 1:
        text = "; ".join(f"{wanted!r} in {', '.join(map(str, folders))}" for wanted, folders in sorted(ranges.items()))
        findings.append(Finding(path=Path("packages"), text=f"ranges of verl-contracts disagree: {text}"))
    for asked in ranges:
        if not re.fullmatch(r"verl-contracts>=\d+\.\d+,<\d+", asked):
            text = f"the range of verl-contracts must read '>=X.Y,<X+1', got {asked!r}"
            findings.append(Finding(path=Path("packages"), text=text))
    return findings


def all_requirements(project: dict[str, object]) -> list[str]:
    """Return the dependencies of a project, those of its extras included."""
    found: list[str] = []
    plain = project.get("dependencies", [])
    extras = project.get("optional-dependencies", {})
    groups = [plain, *(extras.values() if isinstance(extras, dict) else [])]
    for group in groups:
        if isinstance(group, list):
            found += [entry for entry in group if isinstance(entry, str)]
    return found


def main(arguments: list[str]) -> int:
    """Check the repository named, or the one that this file lies in; return 1 when something is wrong."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    files = tracked_files(root)
    findings = [*check_sizes(root, files), *check_machine_paths(root, files), *check_packages(root)]
    for finding in findings:
        print(finding, file=sys.stderr)
    if not findings:
        print(f"ok: {len(files)} files")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
