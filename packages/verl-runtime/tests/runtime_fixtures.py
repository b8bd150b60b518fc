"""What the tests of both runtimes share."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.events import NullEvents
from verl_contracts.runtime import ActorSpec, ObjectSpec, RuntimeSettings
from verl_runtime.local import LocalRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Clock
    from verl_contracts.runtime import ActorRef, DeviceGrant, Runtime
    from verl_runtime.ray import RayRuntime

CLOCK = SystemClock()


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(CLOCK, seconds)


def spec(
    role: str = "worker",
    rank: int = 0,
    *,
    of: str = "Worker",
    grant: DeviceGrant | None = None,
    bundle: int = 0,
    env: dict[str, str] | None = None,
    **arguments: object,
) -> ActorSpec:
    target = ObjectSpec(path=f"actors_for_tests:{of}", arguments=arguments)
    return ActorSpec(role=role, rank=rank, target=target, grant=grant, bundle=bundle, env=env or {})


async def ask(runtime: Runtime, actor: ActorRef, method: str, /, **arguments: object) -> object:
    return await runtime.call(actor, method, arguments, deadline=soon())


@asynccontextmanager
async def local_runtime(*, clock: Clock = CLOCK, **options: object) -> AsyncIterator[LocalRuntime]:
    settings = RuntimeSettings(run_id=f"t{secrets.token_hex(3)}", options=options)
    runtime = await LocalRuntime.create(settings, clock=clock, events=NullEvents())
    try:
        yield runtime
    finally:
        await runtime.close(deadline=Deadline.after(clock, 30.0))


@asynccontextmanager
async def ray_runtime(
    *, clock: Clock = CLOCK, run_id: str | None = None, log_dir: str | None = None, **options: object
) -> AsyncIterator[RayRuntime]:
    from verl_runtime.ray import RayRuntime

    settings = RuntimeSettings(run_id=run_id or f"t{secrets.token_hex(3)}", log_dir=log_dir, options=options)
    runtime = await RayRuntime.create(settings, clock=clock, events=NullEvents())
    try:
        yield runtime
    finally:
        await runtime.close(deadline=Deadline.after(clock, 30.0))
