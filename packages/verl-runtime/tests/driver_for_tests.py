"""A driver that the tests start, and then kill or interrupt. Prints one JSON line when its actors are up."""

from __future__ import annotations

import asyncio
import json
import sys

from runtime_fixtures import ask, ray_runtime, soon, spec


async def main(mode: str, owner_limit_s: float) -> None:
    async with ray_runtime(owner_limit_s=owner_limit_s, num_cpus=2, object_store_mb=128) as runtime:
        actors = [await runtime.spawn(spec(rank=rank), deadline=soon()) for rank in range(2)]
        pids = [await ask(runtime, actor, "pid") for actor in actors]
        children = [await ask(runtime, actor, "start_child") for actor in actors]
        sys.stdout.write(json.dumps({"pids": pids, "children": children, "run_id": runtime.run_id}) + "\n")
        sys.stdout.flush()
        if mode == "raise":
            raise RuntimeError("the trainer raises")
        await asyncio.sleep(60.0)


asyncio.run(main(sys.argv[1], float(sys.argv[2])))
