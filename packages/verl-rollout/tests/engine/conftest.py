"""Fixtures of the engine's tests: each tiny model once per run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from engine_models import Family, Tiny, build, config_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _make(family: Family, folder: Path) -> Tiny:
    config = config_of(family)
    config.save_pretrained(folder)
    return Tiny(path=folder, model=build(config), other=build(config, seed=1))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _make("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=["qwen", "llama"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    value = request.getfixturevalue(request.param)
    if not isinstance(value, Tiny):
        raise TypeError(f"fixture {request.param} is no tiny model")
    return value
