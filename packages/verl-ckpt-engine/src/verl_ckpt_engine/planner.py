"""Who sends to whom, on one host. Pure: no process, no clock, no network.

What cannot work is refused here, before any replica is paused: a receiver that lives on another host would otherwise
show up as a file that does not exist, in the middle of a sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.weights import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.weights import EndpointInfo, Manifest, TopologyPlanner

__all__ = ["MOST_RECEIVERS", "SingleHostPlanner", "check_each_once", "with_one_writer"]

MOST_RECEIVERS = 1024
"""Receivers that one ring serves."""


def with_one_writer(senders: Sequence[EndpointInfo]) -> tuple[EndpointInfo, ...]:
    """Return the senders by rank. Raises `ConfigError` unless they are 0, 1, … without a gap."""
    ordered = tuple(sorted(senders, key=lambda endpoint: endpoint.rank))
    if [endpoint.rank for endpoint in ordered] != list(range(len(ordered))) or not ordered:
        raise ConfigError(f"sender ranks are {[e.rank for e in ordered]}; expected 0, 1, … with rank 0 the writer")
    return ordered


def check_each_once(receivers: Sequence[EndpointInfo]) -> None:
    """Raise `ConfigError` naming a receiver that is listed twice."""
    seen = set[tuple[str, int]]()
    for receiver in receivers:
        place = (receiver.owner, receiver.rank)
        if place in seen:
            raise ConfigError(f"receiver {receiver.owner} rank {receiver.rank} is listed twice")
        seen.add(place)


class SingleHostPlanner:
    """One sender rank to all receiver ranks of the same host.

    Further sender ranks are listed, for they take part in gathering each tensor, but only rank 0 writes.
    """

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

        Raises `ConfigError` for no, doubled or too many endpoints, for a trainer without rank 0, for a bucket of no
        bytes, and for a receiver on another host or in another container.
        """
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; give at least 1 byte")
        if not 1 <= len(receivers) <= MOST_RECEIVERS:
            raise ConfigError(f"there are {len(receivers)} receivers; one ring serves 1 to {MOST_RECEIVERS}")
        ordered = with_one_writer(senders)
        check_each_once(receivers)
        for receiver in receivers:
            if receiver.node != ordered[0].node:
                raise ConfigError(
                    f"the shm backend connects processes of one host, but sender {ordered[0].owner} rank 0 is on "
                    f"{ordered[0].node!r} and receiver {receiver.owner} rank {receiver.rank} on {receiver.node!r}; "
                    "choose a backend that crosses hosts, or place both on one"
                )
            scopes = ordered[0].address.get("scope"), receiver.address.get("scope")
            if scopes[0] != scopes[1]:
                raise ConfigError(
                    f"both {ordered[0].owner} rank 0 and {receiver.owner} rank {receiver.rank} are on "
                    f"{receiver.node!r}, but neither sees the other's processes (scopes {scopes[0]} and {scopes[1]}): "
                    "they run in different containers, or on hosts of the same name; place them in one container, let "
                    "the containers share a pid namespace, or choose a backend that crosses hosts"
                )
        return Plan(
            session=session,
            version=manifest.version,
            manifest=manifest,
            senders=ordered,
            receivers=tuple(receivers),
            bucket_bytes=bucket_bytes,
        )


if TYPE_CHECKING:

    def _is_planner(x: SingleHostPlanner) -> TopologyPlanner:
        return x
