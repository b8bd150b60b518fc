"""Who sends to whom through a folder. Pure: no process, no clock, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ckpt_engine.planner import check_each_once, with_one_writer
from verl_contracts.errors import ConfigError
from verl_contracts.weights import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.weights import EndpointInfo, Manifest, TopologyPlanner

__all__ = ["FolderPlanner"]


class FolderPlanner:
    """One sender rank to all receiver ranks, on whatever hosts.

    Whether these see the folder cannot be told from endpoints; a receiver that does not says so. Further sender ranks
    take part in gathering each tensor, but only rank 0 writes.
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

        Raises `ConfigError` for no or doubled endpoints, for a trainer without rank 0, and for a bucket of no bytes.
        """
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; give at least 1 byte")
        ordered = with_one_writer(senders)
        if not receivers:
            raise ConfigError("there are no receivers")
        check_each_once(receivers)
        return Plan(
            session=session,
            version=manifest.version,
            manifest=manifest,
            senders=ordered,
            receivers=tuple(receivers),
            bucket_bytes=bucket_bytes,
        )


if TYPE_CHECKING:

    def _is_planner(x: FolderPlanner) -> TopologyPlanner:
        return x
