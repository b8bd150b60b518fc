from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution that is nothing but metadata: name, entry points, requirements."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, group: str, entries: dict[str, str], requires: tuple[str, ...] = ()) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        listed = "\n".join(f"{entry} = {value}" for entry, value in entries.items())
        (folder / "entry_points.txt").write_text(f"[{group}]\n{listed}\n")
        sys.path_importer_cache.clear()

    yield add
    sys.path_importer_cache.clear()
