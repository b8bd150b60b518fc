"""What the repository's own linter refuses: a good tree is built, one thing is broken at a time."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import lint_tree
import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROJECT = """
[project]
name = "{name}"
dependencies = [{dependencies}]
"""


def add_package(root: Path, folder: str, module: str, *dependencies: str) -> None:
    """Write a complete package."""
    source = root / folder / "src" / module
    source.mkdir(parents=True)
    for path in (
        source / "__init__.py",
        source / "py.typed",
        root / folder / "README.md",
        root / folder / "CHANGELOG.md",
    ):
        path.write_text("")
    listed = ", ".join(f'"{entry}"' for entry in dependencies)
    name = module.replace("_", "-")
    (root / folder / "pyproject.toml").write_text(PROJECT.format(name=name, dependencies=listed))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    add_package(tmp_path, "contracts", "verl_contracts", "typing-extensions")
    add_package(tmp_path, "packages/verl-one", "verl_one", "verl-contracts>=0.1,<1")
    add_package(tmp_path, "packages/verl-two", "verl_two", "verl-contracts>=0.1,<1", "torch")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=30)
    return tmp_path


def refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is said about `tree`, which must be refused."""
    assert lint_tree.main([str(tree)]) == 1
    return capsys.readouterr().err


def test_main_accepts_a_complete_tree(tree: Path) -> None:
    assert lint_tree.main([str(tree)]) == 0


def test_main_refuses_a_long_source_file_but_not_a_long_test(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = tree / "packages" / "verl-one" / "tests"
    tests.mkdir()
    (tests / "test_x.py").write_text("x = 1\n" * 500)
    module = tree / "packages" / "verl-one" / "src" / "verl_one" / "x.py"
    module.write_text("x = 1\n" * 400)
    assert lint_tree.main([str(tree)]) == 0
    module.write_text("x = 1\n" * 401)
    assert "x.py: 401 lines, at most 400" in refused(tree, capsys)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "pyproject.toml", "src/verl_two/py.typed"])
def test_main_refuses_a_package_that_lacks_a_file(tree: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tree / "packages" / "verl-two" / name).unlink()
    assert f"packages/verl-two: {name} is missing" in refused(tree, capsys)


@pytest.mark.parametrize("path", ["/" + "work/main", "/" + "root/.cache", "/" + "home/somebody/x"])
def test_main_refuses_a_machine_path(tree: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    (tree / "notes.md").write_text(f"first\nsee {path} for more\n")
    assert f"notes.md:2: {path} names a folder of one machine" in refused(tree, capsys)


def test_main_accepts_paths_that_only_look_alike(tree: Path) -> None:
    (tree / "notes.md").write_text("~/work/x ./root/y https://host/home/z packages/work/x\n")
    assert lint_tree.main([str(tree)]) == 0


def test_main_refuses_ranges_that_disagree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_package(tree, "packages/verl-three", "verl_three", "verl-contracts>=0.2,<1")
    said = refused(tree, capsys)
    assert "ranges of verl-contracts disagree" in said
    assert "'verl-contracts>=0.2,<1' in packages/verl-three" in said


def test_main_refuses_a_missing_range(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_package(tree, "packages/verl-three", "verl_three")
    assert "must read '>=X.Y,<X+1', got 'nothing'" in refused(tree, capsys)


def test_main_refuses_a_dependency_on_a_sibling(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_package(tree, "packages/verl-three", "verl_three", "verl-contracts>=0.1,<1", "verl-one")
    assert "packages/verl-three/pyproject.toml: depends on a sibling: verl-one" in refused(tree, capsys)
