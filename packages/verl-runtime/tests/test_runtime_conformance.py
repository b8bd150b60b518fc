"""Both runtimes against the conformance kit; Ray on one cluster that the module shares."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import pytest
from runtime_fixtures import local_runtime, ray_runtime

from verl_contracts.testing.suites.runtime import RuntimeSuite

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Clock
    from verl_contracts.runtime import Runtime


class TestLocal(RuntimeSuite):
    processes: ClassVar[bool] = False

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Runtime]:
        async with local_runtime(clock=clock, num_cpus=4.0) as runtime:
            yield runtime


class TestLocalVirtual(RuntimeSuite):
    processes: ClassVar[bool] = False
    virtual: ClassVar[bool] = True

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Runtime]:
        async with local_runtime(clock=clock, threads=False, num_cpus=4.0) as runtime:
            yield runtime


@pytest.mark.usefixtures("cluster")
class TestRay(RuntimeSuite):
    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Runtime]:
        async with ray_runtime(clock=clock) as runtime:
            yield runtime
