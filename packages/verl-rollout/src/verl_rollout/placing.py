"""Which devices a replica runs on. Owns the pools placed here, never a grant that was given.

A place outlives its replica, so that a dead one can be replaced on its own devices when there are no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.runtime import PlacementRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.runtime import Bundle, DeviceGrant, Runtime

__all__ = ["Place", "Places"]


@dataclass(slots=True, kw_only=True, eq=False)
class _Pool:
    """Devices that were placed here, and how many replicas are on them."""

    grant: DeviceGrant
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where one replica goes."""

    grant: DeviceGrant
    bundle: int
    """Its first bundle."""
    pool: _Pool | None
    """None on a grant of somebody else."""


class Places:
    """The places of one manager, taken and free."""

    def __init__(self, *, runtime: Runtime, devices_per_replica: int, device: Bundle) -> None:
        if devices_per_replica < 1:
            raise ConfigError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size must be at least 1, got {devices_per_replica}"
            )
        self._runtime = runtime
        self._devices_per_replica = devices_per_replica
        self._device = device
        self._free: list[Place] = []

    def use(self, grant: DeviceGrant) -> int:
        """Offer the devices of a grant, and return for how many replicas. Raises `ConfigError` when some are left."""
        bundles, each = len(grant.bundles), self._devices_per_replica
        if bundles == 0 or bundles % each:
            raise ConfigError(
                f"the pool {grant.pool!r} has {bundles} devices, and a replica takes {each} "
                f"(actor_rollout_ref.rollout.tensor_model_parallel_size): {bundles} must be a multiple of {each}"
            )
        self._free += [Place(grant=grant, bundle=first, pool=None) for first in range(0, bundles, each)]
        return bundles // each

    async def take(self, count: int, *, name: str, deadline: Deadline) -> Sequence[Place]:
        """Return `count` places: free ones first, then a new pool called `name`, one bundle per device."""
        if count < 1:
            raise ConfigError(f"at least one replica must be started, got {count}")
        wanted = count - len(self._free)
        if wanted > 0:
            request = PlacementRequest(pool=name, bundles=(self._device,) * (wanted * self._devices_per_replica))
            pool = _Pool(grant=await self._runtime.place(request, deadline=deadline))
            firsts = range(0, len(request.bundles), self._devices_per_replica)
            self._free += [Place(grant=pool.grant, bundle=first, pool=pool) for first in firsts]
        taken, self._free = self._free[:count], self._free[count:]
        for place in taken:
            if place.pool is not None:
                place.pool.users += 1
        return taken

    async def leave(self, place: Place) -> None:
        """Give a place back; a pool that nobody uses any more is released."""
        pool = place.pool
        self._free.append(place)
        if pool is not None:
            pool.users -= 1
            if pool.users == 0:
                self._free = [free for free in self._free if free.pool is not pool]
                await self._runtime.release(pool.grant)
