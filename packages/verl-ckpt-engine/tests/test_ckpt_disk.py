"""The disk backend: what its folders hold, who may load them, and when they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verl_ckpt_engine.disk import FOLDER_VARIABLE, DiskBackend
from verl_contracts.testing.suites.weights import WeightBackendSuite

if TYPE_CHECKING:
    from pathlib import Path

    from verl_contracts.weights import WeightBackend


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for weights, one for each test."""
    folder = tmp_path / "weights"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


class TestDiskBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return DiskBackend
