"""Who holds which devices, as the driver of one run sees it.

Pure bookkeeping that both runtimes share: it turns a request that cannot be met into an error that names what was
wanted, what is free on each node and who holds the rest, and it refuses an actor that would overfill its bundle before
the process exists (a scheduler would let it wait in silence).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError, ResourcesError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from verl_contracts.runtime import Bundle, DeviceGrant, PlacementRequest

__all__ = ["Free", "Pools", "check_request", "fits", "refusal"]

_ROUNDING = 1e-6


@dataclass(slots=True, kw_only=True)
class Free:
    """Devices on one node that nobody holds."""

    cpus: float
    gpus: float

    def take(self, bundle: Bundle) -> bool:
        """Take `bundle` if it is there."""
        if bundle.cpus > self.cpus + _ROUNDING or bundle.gpus > self.gpus + _ROUNDING:
            return False
        self.cpus -= bundle.cpus
        self.gpus -= bundle.gpus
        return True

    def __str__(self) -> str:
        return f"{max(0.0, self.cpus):g} CPU, {max(0.0, self.gpus):g} GPU"


def fits(request: PlacementRequest, nodes: Mapping[str, Free]) -> bool:
    """Say whether `request` can be met by `nodes`: largest bundle first, each on the first node with room."""
    bundles = sorted(request.bundles, key=lambda bundle: (bundle.gpus, bundle.cpus), reverse=True)
    rooms = [Free(cpus=free.cpus, gpus=free.gpus) for free in nodes.values()]
    if request.strategy == "strict_pack":
        return any(all(room.take(bundle) for bundle in bundles) for room in rooms)
    return all(any(room.take(bundle) for room in rooms) for bundle in bundles)


def refusal(request: PlacementRequest, nodes: Mapping[str, Free], holders: Iterable[str]) -> ResourcesError:
    """Build the error for a request that does not fit."""
    sizes: dict[str, int] = {}
    for bundle in request.bundles:
        text = str(Free(cpus=bundle.cpus, gpus=bundle.gpus))
        sizes[text] = sizes.get(text, 0) + 1
    wanted = " + ".join(f"{count} x ({text})" for text, count in sizes.items())
    free = "; ".join(f"{node}: {room}" for node, room in nodes.items()) or "no node"
    held = "; ".join(holders) or "nobody"
    return ResourcesError(
        f"pool {request.pool!r} wants {wanted}, strategy {request.strategy!r}; free: {free}; held by {held}. "
        "Ask for fewer or smaller bundles, free a pool, or give the runtime more devices"
    )


@dataclass(slots=True)
class _Pool:
    request: PlacementRequest
    holders: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Actor name → (bundle, share)."""

    def __str__(self) -> str:
        whole = Free(
            cpus=sum(bundle.cpus for bundle in self.request.bundles),
            gpus=sum(bundle.gpus for bundle in self.request.bundles),
        )
        actors = f" (actors {', '.join(self.holders)})" if self.holders else " (no actor)"
        return f"pool {self.request.pool!r}: {whole}{actors}"


class Pools:
    """The pools of one run and the actors in them. Used from one event loop."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._count = itertools.count(1)

    def next_key(self, request: PlacementRequest) -> str:
        """Return a key that no other pool has; it goes into the grant's token."""
        return f"{request.pool}#{next(self._count)}"

    def open(self, key: str, request: PlacementRequest) -> None:
        """Note a pool."""
        self._pools[key] = _Pool(request)

    def drop(self, key: str) -> bool:
        """Forget a pool; False when it is gone already."""
        return self._pools.pop(key, None) is not None

    def open_keys(self) -> tuple[str, ...]:
        """Return the keys of the pools that are open."""
        return tuple(self._pools)

    def join(self, actor: str, grant: DeviceGrant, bundle: int, *, key: str) -> None:
        """Note that `actor` uses its share of one bundle, or raise because it may not."""
        pool = self._pools.get(key)
        if pool is None:
            raise StateError(f"{actor} cannot start: the grant of pool {grant.pool!r} was released")
        if not 0 <= bundle < len(grant.bundles):
            raise ConfigError(
                f"{actor} wants bundle {bundle} of pool {grant.pool!r}, which has bundles 0 to {len(grant.bundles) - 1}"
            )
        if not 0 < grant.share <= 1:
            raise ConfigError(f"{actor} wants share {grant.share:g} of pool {grant.pool!r}; must be in (0, 1]")
        others = {name: share for name, (index, share) in pool.holders.items() if index == bundle}
        used = sum(others.values())
        if used + grant.share > 1 + _ROUNDING:
            held = ", ".join(f"{name} ({share:g})" for name, share in others.items())
            raise ResourcesError(
                f"{actor} wants {grant.share:g} of bundle {bundle} of pool {grant.pool!r}; free: {1 - used:g}; "
                f"held by {held}. Use smaller shares or another bundle"
            )
        pool.holders[actor] = (bundle, grant.share)

    def leave(self, actor: str) -> None:
        """Forget an actor; harmless when it held nothing."""
        for pool in self._pools.values():
            pool.holders.pop(actor, None)

    def holders(self) -> tuple[str, ...]:
        """Describe every pool in words."""
        return tuple(str(pool) for pool in self._pools.values())

    def held(self) -> Free:
        """Return the sum of all pools."""
        bundles = [bundle for pool in self._pools.values() for bundle in pool.request.bundles]
        return Free(cpus=sum(bundle.cpus for bundle in bundles), gpus=sum(bundle.gpus for bundle in bundles))


def check_request(request: PlacementRequest) -> None:
    """Refuse a request that no machine could meet."""
    if not request.bundles:
        raise ConfigError(f"pool {request.pool!r} asks for no bundle; ask for at least one")
    for bundle in request.bundles:
        if bundle.cpus < 0 or bundle.gpus < 0 or bundle.cpus + bundle.gpus == 0:
            raise ConfigError(f"pool {request.pool!r} has {bundle}: both must be >= 0 and one of them > 0")
