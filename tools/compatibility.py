"""Writes COMPATIBILITY.md, or checks that it is in step, from where its facts are kept.

Ranges come from the packages' own pyproject.toml, tested versions from tools/constraints.txt, builds of vLLM from
tools/vllm_builds.toml, which the noxfile runs, and recipes from their heads; so the page cannot say what nobody tested.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from verl_trainers.recipes.catalog import recipes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "COMPATIBILITY.md"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
VLLM_BUILDS = ROOT / "tools" / "vllm_builds.toml"
UPDATE = "python tools/compatibility.py --write"
SHOWN = ("torch", "transformers", "ray")
"""Libraries that decide whether an installation works; `verl-train doctor` compares all of them."""
TESTED_PYTHON = "3.11"
"""Of the machines that CI runs on."""

HEAD = f"""# Compatibility

Written by `{UPDATE}`; a test compares it. `verl-train doctor` compares an installation with the same ranges.

## Versions

| | range that the packages ask for | tested with |
|---|---|---|
"""
VLLM = """
## vLLM

The packages ask for vLLM `{asked}`. One older than the oldest here is refused, one newer than the newest
is warned of. What a build cannot do is not claimed: `keep` needs 0.32, and the CPU build cannot sleep.

| build | session that runs all tests of the engine with it | needs | last run |
|---|---|---|---|
"""
RECIPES = """
## Recipes

A recipe that never ran from start to end is checked on each commit all the same: keys, rules between them, plug-ins.

| recipe | what | needs | last run |
|---|---|---|---|
"""


def render(root: Path) -> str:
    """Return the page."""
    projects = [tomllib.loads(path.read_text())["project"] for path in sorted(root.glob("*/*/pyproject.toml"))]
    (python,) = {str(project["requires-python"]) for project in projects}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    rows = [("Python", python, TESTED_PYTHON), *((name, asked_of(name, projects), pins[name]) for name in SHOWN)]
    versions = "".join(f"| {name} | `{asked}` | {tested} |\n" for name, asked, tested in rows)
    builds = "".join(
        f"| {row['build']} | `{session}` | {row['needs']} | {row['last_run']} |\n"
        for session, row in tomllib.loads(VLLM_BUILDS.read_text(encoding="utf-8")).items()
    )
    vllm = VLLM.format(asked=asked_of("vllm", projects)) + builds
    table = "".join(f"| `{row.name}` | {row.what} | {row.needs} | {row.last_run} |\n" for row in recipes())
    return HEAD + versions + vllm + RECIPES + table


def asked_of(name: str, projects: list[dict[str, object]]) -> str:
    """Return the ranges that the packages ask of `name`, extras included; one when all ask for the same."""
    asked: set[str] = set()
    for project in projects:
        lists = [project.get("dependencies"), *dict_of(project.get("optional-dependencies")).values()]
        for wanted in lists:
            for text in wanted if isinstance(wanted, list) else []:
                match = re.fullmatch(rf"{name}([<>=!~].*)", str(text))
                asked |= {match[1]} if match else set()
    return " and ".join(sorted(asked)) or "any"


def dict_of(value: object) -> dict[str, object]:
    """Return a table of a TOML file; empty when it is not there."""
    return value if isinstance(value, dict) else {}


def main(arguments: list[str]) -> int:
    """Write with ``--write``, else compare; return 1 when the page is out of step."""
    page = render(ROOT)
    if arguments == ["--write"]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        print(f"ok: {len(recipes())} recipes")
        return 0
    print(f"COMPATIBILITY.md is out of step; run: {UPDATE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
