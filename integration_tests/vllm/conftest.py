"""Needs a vLLM that can run here: the CPU build, or a GPU. The session tests-rollout-vllm installs the former."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from verl_contracts.errors import ConfigError
from verl_rollout.engine.vllm.builds import check_installed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


def missing() -> str | None:
    """Return what is wrong with the vLLM that is installed, by its metadata: this very folder could be imported."""
    try:
        check_installed()
    except ConfigError as exc:
        return f"{exc}; or run tools/nox -s tests-rollout-vllm"
    return None


class WithoutVLLM(pytest.Module):
    """A module of this folder that cannot be imported."""

    def collect(self) -> NoReturn:
        """Skip it, and say why."""
        pytest.skip(missing() or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Let modules be skipped where there is no vLLM."""
    return None if missing() is None else WithoutVLLM.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    from shared import end_all

    yield
    end_all()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Return a folder and the model in it."""
    from shared import tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_model(folder)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Return other weights of the same shapes."""
    from shared import tiny_model

    return tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def words(tiny: tuple[Path, PreTrainedModel]) -> tuple[Path, PreTrainedModel]:
    """Return the tiny model, with a tokenizer beside it."""
    from chats import save_tokenizer

    save_tokenizer(tiny[0])
    return tiny
