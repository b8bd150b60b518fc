"""A driver that joins a cluster of two nodes with one CPU each. Prints what it saw as one JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, cast

from ray.cluster_utils import Cluster
from runtime_fixtures import ask, ray_runtime, soon, spec

from verl_contracts.errors import ResourcesError
from verl_contracts.runtime import Bundle, PlacementRequest
from verl_runtime.ray.elsewhere import run_on_node
from verl_runtime.ray.wire import RayAddress

if TYPE_CHECKING:
    from collections.abc import Callable


def raylet() -> int:
    return os.getppid()


async def main(address: str) -> dict[str, object]:
    seen: dict[str, object] = {}
    two = (Bundle(), Bundle())
    async with ray_runtime(address=address) as runtime, ray_runtime(address=address) as other:
        try:
            await runtime.place(PlacementRequest(pool="packed", bundles=two, strategy="strict_pack"), deadline=soon())
        except ResourcesError as exc:
            seen["strict_pack"] = str(exc)
        grant = await runtime.place(PlacementRequest(pool="spread", bundles=two, strategy="spread"), deadline=soon())
        actors = [await runtime.spawn(spec(rank=rank, grant=grant, bundle=rank), deadline=soon()) for rank in range(2)]
        addresses = [actor.token for actor in actors if isinstance(actor.token, RayAddress)]
        seen["nodes"] = len({address.node_id for address in addresses})
        try:
            await other.place(PlacementRequest(pool="late", bundles=two), deadline=soon(1.0))
        except ResourcesError as exc:
            seen["other_run"] = str(exc)
        seen["other_holder"] = f"{runtime.run_id}" in str(seen.get("other_run"))
        parents = [await run_on_node(address.node_id, raylet) for address in addresses]
        seen["jobs_ran_on_their_node"] = len(set(parents)) == 2
        seen["relay"] = await ask(runtime, actors[0], "relay", actor=actors[1], method="echo", count=2)
    return seen


if __name__ == "__main__":
    make = cast("Callable[..., Cluster]", Cluster)
    cluster = make(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cast("Callable[..., object]", cluster.add_node)(num_cpus=1)
        sys.stdout.write(json.dumps(asyncio.run(main(cluster.address))) + "\n")
    finally:
        cast("Callable[[], None]", cluster.shutdown)()
