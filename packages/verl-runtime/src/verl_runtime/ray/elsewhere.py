"""Short jobs on a given node: reading a log there, killing processes there.

For what the driver cannot reach itself, because an actor lived on another machine and is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["run_on_node"]

P = ParamSpec("P")
T = TypeVar("T")


def run_on_node(node_id: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
    """Run `function` on a node as a Ray task that takes no devices. Fails when the node is gone."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return cast("Awaitable[T]", task.remote(*args, **kwargs))
