"""Two wheels that own one path must be refused, wherever in the wheel that path is written."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import compare_wheels
import pytest

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = "[console_scripts]\nTrain = some.module:main\n"


def wheel(folder: Path, name: str, **files: str) -> str:
    """Write a wheel with `files` (``__`` stands for ``/``) and return its path."""
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for key, text in files.items():
            archive.writestr(key.replace("__", "/"), text)
    return str(path)


def test_main_accepts_wheels_with_nothing_in_common(tmp_path: Path) -> None:
    one = wheel(tmp_path, "one", **{"one/x.py": "", "one-1.dist-info/entry_points.txt": COMMAND})
    two = wheel(tmp_path, "two", **{"two/x.py": "", "two-1.data/scripts/train": ""})
    assert compare_wheels.main([one, two]) == 0


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ({"verl/x.py": ""}, {"verl/x.py": ""}, "site-packages/verl/x.py"),
        ({"verl/x.py": ""}, {"two-1.data/purelib/verl/x.py": ""}, "site-packages/verl/x.py"),
        ({"one-1.dist-info/entry_points.txt": COMMAND}, {"two-1.data/scripts/Train": ""}, "bin/Train"),
    ],
)
def test_main_refuses_a_shared_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: dict[str, str], right: dict[str, str], shared: str
) -> None:
    assert compare_wheels.main([wheel(tmp_path, "one", **left), wheel(tmp_path, "two", **right)]) == 1
    assert f"both own {shared}" in capsys.readouterr().err


def test_main_refuses_to_compare_one_wheel(tmp_path: Path) -> None:
    assert compare_wheels.main([wheel(tmp_path, "one")]) == 2
