from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline
from verl_contracts.events import NullEvents
from verl_contracts.runtime import RuntimeSettings
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.suites.runtime import RuntimeSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Clock
    from verl_contracts.runtime import Runtime


class TestInProcessRuntime(RuntimeSuite):
    processes = False
    virtual = True

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Runtime]:
        runtime = await InProcessRuntime.create(RuntimeSettings(run_id="t"), clock=clock, events=NullEvents())
        yield runtime
        await runtime.close(deadline=Deadline.after(clock, 5.0))
