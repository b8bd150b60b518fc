# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of an `ExperienceStore`: every group given out exactly once, in the order asked for."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import pytest

from verl_contracts.errors import StateError
from verl_contracts.runtime import PayloadRef
from verl_contracts.samples import FAILED, SCORED, GroupResult, GroupUid, SampleResult
from verl_contracts.testing.suites.base import ContractSuite

if TYPE_CHECKING:
    from verl_contracts.training import ExperienceStore

__all__ = ["ExperienceStoreSuite"]


def _group(row: int) -> GroupResult:
    good = SampleResult(index=0, outcome=SCORED, score=0.5, payload=PayloadRef(num_bytes=0, value=row), versions=(0, 1))
    return GroupResult(uid=GroupUid(epoch=0, row=row), samples=(good, SampleResult(index=1, outcome=FAILED)))


class ExperienceStoreSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `store`."""

    @abc.abstractmethod
    def store(self) -> ExperienceStore:
        """Return an empty store."""

    def test_groups_come_back_unchanged_in_the_order_asked_for(self) -> None:
        store = self.store()
        groups = [_group(row) for row in range(4)]
        for group in groups:
            store.put(group)
        assert len(store) == 4
        assert store.take([groups[i].uid for i in (2, 0)]) == (groups[2], groups[0])
        assert len(store) == 2
        assert store.take([]) == ()

    def test_same_uid_twice_is_refused_and_the_first_kept(self) -> None:
        store = self.store()
        store.put(_group(1))
        with pytest.raises(StateError, match="0-1-0"):
            store.put(GroupResult(uid=GroupUid(epoch=0, row=1), samples=()))
        assert store.take([GroupUid(epoch=0, row=1)]) == (_group(1),)

    def test_missing_group_is_named_and_nothing_is_taken(self) -> None:
        store = self.store()
        store.put(_group(1))
        with pytest.raises(StateError, match="0-9-0"):
            store.take([GroupUid(epoch=0, row=1), GroupUid(epoch=0, row=9)])
        assert len(store) == 1

    def test_taken_group_is_gone(self) -> None:
        store = self.store()
        store.put(_group(1))
        store.take([GroupUid(epoch=0, row=1)])
        with pytest.raises(StateError):
            store.take([GroupUid(epoch=0, row=1)])
        store.put(_group(1))
        assert len(store) == 1

    def test_attempts_of_one_row_are_different_groups(self) -> None:
        store = self.store()
        store.put(_group(1))
        store.put(GroupResult(uid=GroupUid(epoch=0, row=1, attempt=1), samples=()))
        assert len(store) == 2

    def test_discarding_is_harmless_when_it_is_not_there(self) -> None:
        store = self.store()
        store.put(_group(1))
        store.discard(GroupUid(epoch=0, row=1))
        store.discard(GroupUid(epoch=0, row=1))
        assert len(store) == 0
