"""The driver's hold on one host: its few remote methods, typed, and the heartbeat that keeps it alive."""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, cast

from verl_runtime.ray.host import CONTROL, ActorHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ray.actor import ActorClass, ActorHandle
    from ray.util.placement_group import PlacementGroup

    from verl_contracts.failures import FailureRecord
    from verl_runtime.ray.host import Birth
    from verl_runtime.ray.port import Exchange
    from verl_runtime.ray.wire import Boot

__all__ = ["Handle", "Pulse", "open_handle"]

_log = logging.getLogger(__name__)
_EXCHANGES = 1000
"""Exchanges that may wait at a host at once: about two for each process that calls it."""


class Handle:
    """Remote methods of one host."""

    def __init__(self, actor: ActorHandle[ActorHost]) -> None:
        self._actor = actor
        self.exchange = cast("Exchange", actor.exchange)

    def born(self) -> Awaitable[Birth]:
        """Return once the process is there."""
        return cast("Awaitable[Birth]", self._actor.born.options(concurrency_group=CONTROL).remote())

    def build(self) -> Awaitable[FailureRecord | None]:
        """Build the object."""
        return cast("Awaitable[FailureRecord | None]", self._actor.build.remote())

    def listen(self) -> Awaitable[list[FailureRecord]]:
        """Wait for reports."""
        return cast("Awaitable[list[FailureRecord]]", self._actor.listen.options(concurrency_group=CONTROL).remote())

    async def stop(self, limit_s: float) -> None:
        """Close the object and kill the children."""
        await self._actor.stop.options(concurrency_group=CONTROL).remote(limit_s)

    def beat(self) -> None:
        """Say that the driver lives, without waiting for an answer."""
        self._actor.beat.options(concurrency_group=CONTROL).remote()

    def kill(self) -> None:
        """End the process at once. Harmless when it is gone."""
        import ray

        try:
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
        except Exception as exc:  # Ray itself is going, and takes the process with it
            _log.warning("Ray could not kill an actor: %s", exc)


def open_handle(
    boot: Boot,
    *,
    namespace: str,
    cpus: float,
    gpus: float,
    group: PlacementGroup | None,
    bundle: int,
    env: dict[str, str],
) -> Handle:
    """Ask Ray for a process with a host in it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = "DEFAULT" if group is None else PlacementGroupSchedulingStrategy(group, bundle)
    host = _remote_host().options(
        name=boot.name,
        namespace=namespace,
        num_cpus=cpus,
        num_gpus=gpus,
        max_concurrency=_EXCHANGES,
        max_restarts=0,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": env} if env else None,
    )
    return Handle(cast("ActorHandle[ActorHost]", host.remote(boot)))


@functools.cache
def _remote_host() -> ActorClass[ActorHost]:
    """Make the Ray class once, since Ray keeps every one that is made."""
    import ray

    decorate = cast("Callable[..., Callable[[type[ActorHost]], ActorClass[ActorHost]]]", ray.remote)
    return decorate(concurrency_groups={CONTROL: 8})(ActorHost)


class Pulse:
    """Tells every host, from a thread of its own, that the driver lives."""

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._handles: dict[str, Handle] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="driver-pulse", daemon=True)
        self._thread.start()

    def add(self, name: str, handle: Handle) -> None:
        """Keep a host alive from now on."""
        self._handles[name] = handle

    def remove(self, name: str) -> None:
        """Leave a host alone."""
        self._handles.pop(name, None)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join(self._every_s)

    def _beat(self) -> None:
        while not self._stop.wait(self._every_s):
            for name, handle in list(self._handles.items()):
                try:
                    handle.beat()
                except Exception as exc:  # the host is going, or Ray is
                    _log.debug("no beat for %s: %s", name, exc)
