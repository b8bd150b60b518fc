"""What counts as a change of the surface, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import surface

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
class Caller(Protocol):
    Config: ClassVar[type]
    limit: float = 1.0

    async def call(self, name: str, /, *, deadline: Deadline) -> object: ...

    def _own(self) -> None: ...

def helper(x: int) -> int: ...

KINDS = ("a", "b")
"""


def described(folder: Path, text: str) -> str:
    (folder / "family.py").write_text(text)
    return surface.describe(folder)


def test_describe_gives_one_line_to_each_member(tmp_path: Path) -> None:
    assert described(tmp_path, MODULE).splitlines() == [
        "family: class Caller(Protocol)",
        "family.Caller: Config: ClassVar[type]",
        "family.Caller: limit: float = 1.0",
        "family.Caller: async def call(self, name: str, /, *, deadline: Deadline) -> object",
        "family: def helper(x: int) -> int",
        "family: KINDS = ('a', 'b')",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("deadline: Deadline)", "deadline: Deadline, retries: int = 0)"),
        ("async def call", "def call"),
        ("name: str, /", "name: str"),
        ("def _own", "def own"),
        ("limit: float = 1.0", "limit: float = 2.0"),
        ("(Protocol)", "(Base, Protocol)"),
    ],
)
def test_describe_changes_when_an_implementer_is_concerned(tmp_path: Path, old: str, new: str) -> None:
    assert described(tmp_path, MODULE.replace(old, new)) != described(tmp_path, MODULE)


@pytest.mark.parametrize(("old", "new"), [("_own", "_other"), ("Protocol):", "Protocol):\n    '''Words.'''")])
def test_describe_stays_when_nobody_is_concerned(tmp_path: Path, old: str, new: str) -> None:
    assert described(tmp_path, MODULE.replace(old, new)) == described(tmp_path, MODULE)


def test_main_refuses_a_surface_that_was_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described(tmp_path, MODULE)
    monkeypatch.setattr(surface, "SOURCE", tmp_path)
    monkeypatch.setattr(surface, "SNAPSHOT", tmp_path / "surface.txt")
    assert surface.main(["--write"]) == 0
    assert surface.main([]) == 0
    described(tmp_path, MODULE.replace("name: str, /", "name: str"))
    assert surface.main([]) == 1
    assert "+family.Caller: async def call(self, name: str, *, deadline: Deadline) -> object" in capsys.readouterr().err
