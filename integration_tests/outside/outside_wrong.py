"""Plug-ins with one mistake each, for the checks to find."""

from __future__ import annotations

from outside_managers import OutsideAgentLoopManager, OutsideCheckpointManager

from verl_contracts.clock import Deadline
from verl_contracts.samples import GroupRequest, GroupResult
from verl_contracts.weights import SyncReport


class NoCreate:
    """Offers nothing."""


class SyncUpdate(OutsideCheckpointManager):
    """Blocks where the contract awaits."""

    def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:  # type: ignore[override]
        raise AssertionError("never called")


class WrongKeyword(OutsideAgentLoopManager):
    """Has another keyword than the contract."""

    async def run_group(self, request: GroupRequest, /, *, timeout: Deadline) -> GroupResult:  # type: ignore[override]
        raise AssertionError("never called")


not_a_class = 3
