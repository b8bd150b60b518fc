"""A package is complete when every public module imports, or says which extra it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "check_isolated.py"
METADATA = "Metadata-Version: 2.1\nName: demo-pkg\nVersion: 1\nProvides-Extra: fast\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    package = tmp_path / "demo_pkg"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "plain.py").write_text("import json\n")
    (package / "inner" / "__init__.py").write_text("")
    (tmp_path / "demo_pkg-1.dist-info").mkdir()
    (tmp_path / "demo_pkg-1.dist-info" / "METADATA").write_text(METADATA)
    return tmp_path


def check(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60, check=False
    )


def test_main_accepts_a_package_that_imports(site: Path) -> None:
    result = check(site, "--import-all", "demo_pkg", "--absent", "demo_sibling")
    assert (result.returncode, result.stderr) == (0, "")


def test_main_refuses_a_module_that_must_be_absent(site: Path) -> None:
    (site / "demo_sibling.py").write_text("")
    result = check(site, "--absent", "demo_sibling")
    assert result.returncode == 1
    assert "demo_sibling can be imported" in result.stderr


def test_main_refuses_a_nested_module_that_does_not_import(site: Path) -> None:
    (site / "demo_pkg" / "inner" / "deep.py").write_text("import surely_not_installed\n")
    result = check(site, "--import-all", "demo_pkg")
    assert result.returncode == 1
    assert "import demo_pkg.inner.deep: ModuleNotFoundError: No module named 'surely_not_installed'" in result.stderr


def test_main_accepts_a_module_that_names_an_extra_of_its_package(site: Path) -> None:
    (site / "demo_pkg" / "quick.py").write_text("raise ImportError(\"pip install 'demo-pkg[fast]'\")\n")
    result = check(site, "--import-all", "demo_pkg")
    assert result.returncode == 0
    assert "import demo_pkg.quick needs demo-pkg[fast]" in result.stdout


def test_main_refuses_a_module_that_names_an_unknown_extra(site: Path) -> None:
    (site / "demo_pkg" / "quick.py").write_text("raise ImportError(\"pip install 'demo-pkg[slow]'\")\n")
    assert check(site, "--import-all", "demo_pkg").returncode == 1


@pytest.mark.parametrize(
    ("value", "code"), [("demo_pkg.plain:json", 0), ("demo_pkg.plain:Gone", 1), ("demo_pkg.gone", 1)]
)
def test_main_loads_every_entry_point(site: Path, value: str, code: int) -> None:
    (site / "demo_pkg-1.dist-info" / "entry_points.txt").write_text(f"[demo.group]\nname = {value}\n")
    result = check(site, "--import-all", "demo_pkg")
    assert result.returncode == code
    assert code == 0 or f"entry point demo.group: name = {value}" in result.stderr
