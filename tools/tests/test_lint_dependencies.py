"""What a package imports must be declared, by whatever name its distribution has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lint_dependencies
import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROJECT = """
[project]
name = "verl-one"
dependencies = ["verl-contracts>=0.1,<1", "typing_extensions"]
[project.optional-dependencies]
fast = ["ray[default]>=2.50", "PyYAML"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [
        "import os.path",
        "import verl_contracts.waits",
        "from verl_one.x import y",
        "from . import y",
        "import typing_extensions",
        "def f():\n    import ray.util",
        "import yaml",
        "if TYPE_CHECKING:\n    import torch",
    ],
)
def test_check_accepts_what_is_declared(folder: Path, source: str) -> None:
    (folder / "src" / "x.py").write_text(source)
    assert lint_dependencies.check(folder) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from numpy.typing import NDArray",
        "def f():\n    import numpy",
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
    ],
)
def test_check_refuses_what_is_not_declared(folder: Path, source: str) -> None:
    (folder / "src" / "x.py").write_text(source)
    (finding,) = lint_dependencies.check(folder)
    assert "imports numpy" in finding
    assert "declares no numpy" in finding


def test_main_counts_a_finding_in_any_package(folder: Path) -> None:
    assert lint_dependencies.main([str(folder)]) == 0
    (folder / "src" / "x.py").write_text("import numpy")
    assert lint_dependencies.main([str(folder)]) == 1
