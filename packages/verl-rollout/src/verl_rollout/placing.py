"""Which devices a replica runs on. Owns the pools placed here, never a grant that was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.runtime import Bundle, PlacementRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.runtime import DeviceGrant, Runtime

__all__ = ["Place", "Pool", "places_on_grant", "places_on_own_pool"]


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """Devices that were placed for some replicas, and how many of these are left."""

    grant: DeviceGrant
    users: int

    async def leave(self, runtime: Runtime) -> None:
        """Give the devices back when the last replica leaves."""
        self.users -= 1
        if self.users == 0:
            await runtime.release(self.grant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one replica goes."""

    grant: DeviceGrant
    bundle: int
    """Its first bundle."""
    pool: Pool | None
    """What to leave afterwards; None on a grant of somebody else."""


def places_on_grant(grant: DeviceGrant, *, devices_per_replica: int) -> Sequence[Place]:
    """Return one place per `devices_per_replica` bundles of a grant. Raises `ConfigError` when some would be left."""
    bundles = len(grant.bundles)
    if devices_per_replica < 1 or bundles == 0 or bundles % devices_per_replica:
        raise ConfigError(
            f"the pool {grant.pool!r} has {bundles} devices, and a replica takes {devices_per_replica} "
            f"(actor_rollout_ref.rollout.tensor_model_parallel_size): {bundles} must be a multiple of it"
        )
    return [Place(grant=grant, bundle=first, pool=None) for first in range(0, bundles, devices_per_replica)]


async def places_on_own_pool(
    name: str, *, count: int, devices_per_replica: int, device: Bundle, runtime: Runtime, deadline: Deadline
) -> Sequence[Place]:
    """Place `count` replicas on a pool of their own, one bundle per device."""
    if count < 1 or devices_per_replica < 1:
        raise ConfigError(
            f"at least one replica of at least one device is needed, got {count} replicas of {devices_per_replica}"
        )
    request = PlacementRequest(pool=name, bundles=(device,) * (count * devices_per_replica))
    grant = await runtime.place(request, deadline=deadline)
    pool = Pool(grant=grant, users=count)
    return [Place(grant=grant, bundle=index * devices_per_replica, pool=pool) for index in range(count)]
