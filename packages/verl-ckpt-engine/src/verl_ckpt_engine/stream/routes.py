"""Who gets the weights from whom. Pure: no process, no clock, no network.

Receivers form trees of two children a node: however many there are, no rank sends more than twice what it has. Each
sender is the root of one tree; they share the receivers.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from verl_ckpt_engine.planner import check_each_once
from verl_contracts.errors import ConfigError
from verl_contracts.weights import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.weights import EndpointInfo, Manifest, TopologyPlanner

__all__ = ["HOST_VARIABLE", "TreePlanner", "children_of_receiver", "children_of_sender", "parent_of"]

CHILDREN = 2
"""Most that one rank sends to."""
HOST_VARIABLE = "VERL_HOST_IP"
"""Environment variable that names the address at which other hosts reach this one."""


def parent_of(plan: Plan, receiver: int) -> EndpointInfo:
    """Return whom the `receiver`-th of the plan gets its weights from."""
    trees = len(plan.senders)
    place, tree = divmod(receiver, trees)
    if place < CHILDREN:
        return plan.senders[tree]
    return plan.receivers[(place // CHILDREN - 1) * trees + tree]


def children_of_sender(plan: Plan, sender: int) -> list[int]:
    """Return which of the plan's receivers get their weights from its `sender`-th sender."""
    trees = len(plan.senders)
    return [child for child in range(sender, trees * CHILDREN, trees) if child < len(plan.receivers)]


def children_of_receiver(plan: Plan, receiver: int) -> list[int]:
    """Return which of the plan's receivers get their weights from its `receiver`-th."""
    trees = len(plan.senders)
    place, tree = divmod(receiver, trees)
    first = (place + 1) * CHILDREN
    return [
        child for child in range(first * trees + tree, (first + CHILDREN) * trees, trees) if child < len(plan.receivers)
    ]


class TreePlanner:
    """Sender ranks share the receivers, which hand on what they get."""

    def plan(
        self,
        manifest: Manifest,
        /,
        *,
        session: str,
        senders: Sequence[EndpointInfo],
        receivers: Sequence[EndpointInfo],
        bucket_bytes: int,
    ) -> Plan:
        """Return the plan, senders by rank and receivers as given.

        Raises `ConfigError` for no or doubled endpoints, for a bucket of no bytes, and for hosts of which one cannot be
        reached from the others.
        """
        ordered = tuple(sorted(senders, key=lambda endpoint: endpoint.rank))
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; give at least 1 byte")
        if [endpoint.rank for endpoint in ordered] != list(range(len(ordered))) or not ordered:
            raise ConfigError(f"sender ranks are {[e.rank for e in ordered]}; expected 0, 1, …")
        if not receivers:
            raise ConfigError("there are no receivers")
        check_each_once(receivers)
        endpoints = (*ordered, *receivers)
        nodes = sorted({endpoint.node for endpoint in endpoints})
        for endpoint in endpoints:
            if len(nodes) > 1 and _only_local(endpoint.address.get("host", "")):
                raise ConfigError(
                    f"{endpoint.owner} rank {endpoint.rank} on {endpoint.node!r} can be reached at "
                    f"{endpoint.address.get('host')!r} only, and the sync is among {', '.join(nodes)}: set "
                    f"{HOST_VARIABLE} there to its address in their network"
                )
        return Plan(
            session=session,
            version=manifest.version,
            manifest=manifest,
            senders=ordered,
            receivers=tuple(receivers),
            bucket_bytes=bucket_bytes,
        )


def _only_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost")


if TYPE_CHECKING:

    def _is_planner(x: TreePlanner) -> TopologyPlanner:
        return x
