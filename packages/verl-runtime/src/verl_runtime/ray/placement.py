"""Placement groups: asked for, awaited for a limited time, and removed when they did not come.

Ray lets a placement group that cannot be had wait in silence. Here it becomes an error that says what is free where and
who holds the rest, and nothing of it stays behind.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypedDict, cast

from verl_runtime.pools import Free, fits, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ray.util.placement_group import PlacementGroup

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.errors import ResourcesError
    from verl_contracts.runtime import PlacementRequest
    from verl_runtime.pools import Pools

__all__ = ["open_group", "remove_group"]

_STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict_pack": "STRICT_PACK"}
_SLICE_S = 0.25
_SETTLE_S = 5.0
"""How long Ray may take to hand back devices that were just released."""


async def open_group(
    request: PlacementRequest, *, name: str, pools: Pools, alone: bool, deadline: Deadline, clock: Clock
) -> PlacementGroup:
    """Reserve devices under `name`, or raise `ResourcesError`.

    What no node could ever hold is refused at once; what others hold is awaited until `deadline`, but only for a moment
    when nobody else is there who could give something back.
    """
    import ray

    if not fits(request, _nodes(total=True)):
        raise _refuse(request, name=name, pools=pools)
    if alone and not fits(request, _nodes(total=True, minus=pools)):
        raise _refuse(request, name=name, pools=pools)
    if alone:
        deadline = deadline.within(clock, _SETTLE_S)
    bundles = [
        {kind: amount for kind, amount in (("CPU", bundle.cpus), ("GPU", bundle.gpus)) if amount > 0}
        for bundle in request.bundles
    ]
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=_STRATEGIES[request.strategy], name=name)
    try:
        while not await asyncio.to_thread(group.wait, min(_SLICE_S, deadline.remaining(clock))):
            if deadline.remaining(clock) <= 0:
                raise _refuse(request, name=name, pools=pools)
    except BaseException:
        remove_group(group)
        raise
    return group


def remove_group(group: PlacementGroup) -> None:
    """Give the devices back."""
    import ray

    ray.util.remove_placement_group(group)


class _Node(TypedDict):
    """What Ray tells of a node, as far as it is used here."""

    NodeID: str
    NodeManagerHostname: str
    Alive: bool
    Resources: dict[str, float]


def _nodes(*, total: bool, minus: Pools | None = None) -> Mapping[str, Free]:
    import ray
    from ray._private.state import available_resources_per_node

    ask_free = cast("Callable[[], dict[str, dict[str, float]]]", available_resources_per_node)
    ask_nodes = cast("Callable[[], list[_Node]]", ray.nodes)
    available = {} if total else ask_free()
    nodes: dict[str, Free] = {}
    for node in ask_nodes():
        if not node["Alive"]:
            continue
        resources = node["Resources"] if total else available.get(node["NodeID"], {})
        free = Free(cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0))
        name = node["NodeManagerHostname"]
        nodes[name if name not in nodes else f"{name} ({node['NodeID'][:6]})"] = free
    if minus is not None and len(nodes) == 1:
        held = minus.held()
        nodes = {name: Free(cpus=free.cpus - held.cpus, gpus=free.gpus - held.gpus) for name, free in nodes.items()}
    return nodes


def _refuse(request: PlacementRequest, *, name: str, pools: Pools) -> ResourcesError:
    """Describe what is free and who holds the rest: our pools, other runs' groups, and what nobody accounts for."""
    import ray

    own = name.rpartition("/")[0] + "/"
    others = [
        f"placement group {row['name']!r}"
        for row in ray.util.placement_group_table().values()
        if row["state"] == "CREATED" and not row["name"].startswith(own)
    ]
    nodes, free = _nodes(total=True).values(), _nodes(total=False)
    held = pools.held()
    cpus = sum(node.cpus for node in nodes) - sum(room.cpus for room in free.values()) - held.cpus
    gpus = sum(node.gpus for node in nodes) - sum(room.gpus for room in free.values()) - held.gpus
    rest = []
    if not others and (cpus > 0 or gpus > 0):
        rest = [f"something outside any pool, or just being released: {Free(cpus=cpus, gpus=gpus)}"]
    return refusal(request, free, [*pools.holders(), *others, *rest])
