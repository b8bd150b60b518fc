"""The kit's suite against every mode of this package."""

from __future__ import annotations

from verl_contracts.testing.suites.mode import TrainerModeSuite
from verl_trainers.modes.fully_async import FullyAsyncMode
from verl_trainers.modes.sync import SyncMode


class TestSync(TrainerModeSuite):
    def mode(self) -> SyncMode:
        return SyncMode()


class TestFullyAsync(TrainerModeSuite):
    def mode(self) -> FullyAsyncMode:
        return FullyAsyncMode()
