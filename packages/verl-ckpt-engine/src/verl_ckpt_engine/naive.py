"""The `naive` backend: buckets are copied from thread to thread, where trainer and engines are one process.

Owns nothing but the list of slots that are offered in this process. It needs no transport at all, which makes it what
the others are compared with; a replica of another process is refused by the planner.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from verl_ckpt_engine.stream.receiver import StreamReceiver
from verl_ckpt_engine.stream.routes import TreePlanner
from verl_ckpt_engine.stream.sender import StreamSender
from verl_contracts.errors import ConfigError
from verl_contracts.weights import WireFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_ckpt_engine.stream.medium import Inlet, Medium, Outlet
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import (
        EndpointInfo,
        Manifest,
        Plan,
        TopologyPlanner,
        WeightBackend,
        WeightReceiver,
        WeightSender,
    )

__all__ = ["NaiveBackend"]

_PROCESS: Final = secrets.token_hex(8)
_offered: dict[str, Sequence[torch.Tensor]] = {}
"""Key → the slots of one rank, for those below it."""


class _End:
    """Either end of an edge."""

    address: ClassVar[Mapping[str, str]] = {}

    def open(self, deadline: Deadline) -> None:
        """Nothing is connected."""

    def push(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Nothing: the child fetches."""

    def pull(self, place: Mapping[str, str], slot: int, into: torch.Tensor, deadline: Deadline) -> None:
        """Copy from the parent's slot."""
        slots = _offered.get(place["slots"])
        if slots is None:
            raise RuntimeError("its slots are gone")
        into.copy_(slots[slot][: into.numel()])

    def cut(self) -> None:
        """Nothing blocks."""

    def close(self) -> None:
        """Nothing is held."""


class NaiveMedium:
    """Memory of this process."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(8)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free(self, memory: torch.Tensor) -> None:
        """Take the offer back; who copies just now has memory of its own to hold on to."""
        _offered.pop(self._key, None)

    def place(self, slots: Sequence[torch.Tensor]) -> Mapping[str, str]:
        """Offer the slots."""
        _offered[self._key] = tuple(slots)
        return {"slots": self._key}

    def outlet(self, host: str, clock: Clock) -> Outlet:
        """Make the parent's end."""
        return _End()

    def inlet(self, host: str, address: Mapping[str, str], clock: Clock) -> Inlet:
        """Make the child's end."""
        return _End()

    def close(self) -> None:
        """Take the offer back."""
        _offered.pop(self._key, None)


class NaiveSender(StreamSender):
    """One trainer rank."""

    medium = NaiveMedium

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Say where children find us, and in which process."""
        return _with_process(super().prepare(manifest, session=session))


class NaiveReceiver(StreamReceiver):
    """One engine rank."""

    medium = NaiveMedium

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Say where children find us, and in which process."""
        return _with_process(super().prepare(session=session, rank=rank))


class OneProcessPlanner:
    """Refuses ranks of different processes."""

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
        """Return the plan. Raises `ConfigError` naming a rank of another process, and for what a tree cannot be."""
        plan = TreePlanner().plan(
            manifest, session=session, senders=senders, receivers=receivers, bucket_bytes=bucket_bytes
        )
        first = plan.senders[0]
        for other in (*plan.senders, *receivers):
            if other.address.get("process") != first.address.get("process"):
                raise ConfigError(
                    f"the backend 'naive' moves weights within one process, and {other.owner} rank {other.rank} is not "
                    f"in that of {first.owner} rank {first.rank}: choose another backend, such as shm or gloo"
                )
        return plan


class NaiveBackend:
    """Moves weights within one process."""

    sender_class: ClassVar[type[WeightSender]] = NaiveSender
    receiver_class: ClassVar[type[WeightReceiver]] = NaiveReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = OneProcessPlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WireFormat(format_id="verl-buckets", version=1),)


def _with_process(endpoint: EndpointInfo) -> EndpointInfo:
    return replace(endpoint, address={**endpoint.address, "process": f"{os.getpid()} {_PROCESS}"})


if TYPE_CHECKING:

    def _is_backend(x: NaiveBackend) -> WeightBackend:
        return x

    def _is_medium(x: NaiveMedium) -> Medium:
        return x

    def _is_planner(x: OneProcessPlanner) -> TopologyPlanner:
        return x
