"""A pytest plug-in that keeps only the suites of the conformance kit: ``pytest -p only_conformance``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from verl_contracts.testing.suites.base import ContractSuite

if TYPE_CHECKING:
    from collections.abc import Sequence


def belongs_to_suite(item: pytest.Item) -> bool:
    """Whether `item` is a test of a class that subclasses a suite."""
    return isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, ContractSuite)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect everything else."""
    dropped: Sequence[pytest.Item] = [item for item in items if not belongs_to_suite(item)]
    items[:] = [item for item in items if belongs_to_suite(item)]
    config.hook.pytest_deselected(items=dropped)
