"""Running one test of a suite against an implementation that breaks one rule."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.testing.suites.base import ContractSuite

__all__ = ["Broken", "name_of", "reject"]


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One broken implementation, and the test that must find out."""

    kind: type
    test: str
    says: str
    """What the failure must match, so that a mere crash of the test does not count."""
    parameters: Mapping[str, object] = field(default_factory=dict)


def name_of(row: Broken) -> str:
    """Return the id of a parametrized test."""
    return f"{row.kind.__name__}-{row.test.removeprefix('test_')}"


def reject(subject: type[ContractSuite], row: Broken) -> None:
    """Fail unless the suite rejects the implementation, for the reason that was broken."""
    suite = type(f"Of{row.kind.__name__}", (subject,), {"kind": row.kind})()
    with pytest.raises((Exception, pytest.fail.Exception)) as caught:
        getattr(suite, row.test)(**row.parameters)
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(row.says, text, re.DOTALL), f"rejected, but for another reason: {text}"
