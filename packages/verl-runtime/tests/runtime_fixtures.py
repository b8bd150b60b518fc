"""What the tests of both runtimes share."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.events import NullEvents
from verl_contracts.runtime import ActorSpec, ObjectSpec, RuntimeSettings
from verl_runtime.local import LocalRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

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


async def wait_until(condition: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    """Poll until `condition` holds."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what is awaited happens in other processes
            await asyncio.sleep(0.02)


def free(resource: str) -> float:
    """How much of a resource Ray has to give."""
    import ray

    return cast("Callable[[], dict[str, float]]", ray.available_resources)().get(resource, 0.0)


def all_cpus_are_free() -> bool:
    """Ray hands devices back a moment after they were released."""
    import ray

    return free("CPU") == cast("Callable[[], dict[str, float]]", ray.cluster_resources)().get("CPU")


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
    *,
    clock: Clock = CLOCK,
    run_id: str | None = None,
    log_dir: str | None = None,
    owner_limit_s: float = 10.0,
    **options: object,
) -> AsyncIterator[RayRuntime]:
    from verl_runtime.ray import RayRuntime

    settings = RuntimeSettings(
        run_id=run_id or f"t{secrets.token_hex(3)}", log_dir=log_dir, owner_limit_s=owner_limit_s, options=options
    )
    runtime = await RayRuntime.create(settings, clock=clock, events=NullEvents())
    try:
        yield runtime
    finally:
        await runtime.close(deadline=Deadline.after(clock, 30.0))
