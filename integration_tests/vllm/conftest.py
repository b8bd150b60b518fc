"""Needs a vLLM that can run here: the CPU build, or a GPU. The session tests-rollout-vllm installs the former."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="these tests need vLLM: tools/nox -s tests-rollout-vllm")

from chats import save_tokenizer  # noqa: E402 - after the skip
from shared import end_all, tiny_model  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Return a folder and the model in it."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_model(folder)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Return other weights of the same shapes."""
    return tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def words(tiny: tuple[Path, PreTrainedModel]) -> tuple[Path, PreTrainedModel]:
    """Return the tiny model, with a tokenizer beside it."""
    save_tokenizer(tiny[0])
    return tiny
