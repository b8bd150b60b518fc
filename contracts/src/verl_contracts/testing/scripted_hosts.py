"""Weight movement without weights: hosts whose tensors are names, and whose digests follow from the version.

For tests of checkpoint managers in virtual time: every phase can be made to fail or to take long. The endpoints are
those of `verl_contracts.testing.memory`, whose planner accepts them.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from verl_contracts.errors import StateError
from verl_contracts.weights import EndpointInfo, Manifest, Plan, TensorMeta, TransferReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import WeightReceiverHost, WeightSenderHost

__all__ = ["ScriptedReceiverHost", "ScriptedSenderHost", "VersionHolder"]


class VersionHolder(Protocol):
    """What a receiver host changes: something that holds a version of weights, or none."""

    @property
    def replica_id(self) -> str:
        """Name of the owner."""
        ...

    def invalidate(self) -> None:
        """Hold mixed weights."""
        ...

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """Hold `version`."""
        ...


_TENSORS = ("embed", "layer", "head")


def _digests(version: int) -> dict[str, int]:
    return {
        name: int.from_bytes(hashlib.blake2b(f"{name} {version}".encode(), digest_size=8).digest(), "big")
        for name in _TENSORS
    }


def _report(owner: str, plan: Plan) -> TransferReport:
    return TransferReport(
        owner=owner,
        rank=0,
        tensors=len(_TENSORS),
        num_bytes=plan.manifest.num_bytes,
        seconds=0.0,
        digests=_digests(plan.version),
    )


@dataclass(slots=True)
class _Host:
    """What both hosts do alike: raise the fault of a phase, and take time."""

    clock: Clock
    seconds: float = 0.0
    """How long each transfer takes."""
    faults: dict[str, Exception] = field(default_factory=dict)
    """Method name → what it raises; tests change it while running."""
    calls: list[str] = field(default_factory=list)
    """Method names, in order of calls."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults[name]

    async def pass_time(self) -> None:
        if self.seconds > 0:
            try:
                async with asyncio.timeout(self.seconds):
                    await self.aborted.wait()
            except TimeoutError:  # the transfer is over
                return


class ScriptedReceiverHost(_Host):
    """The receivers of one replica. It receives whatever version the plan names."""

    def __init__(self, replica: VersionHolder, clock: Clock) -> None:
        super().__init__(clock)
        self._replica = replica

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        """Name one endpoint."""
        self.enter("prepare")
        self.aborted.clear()
        return (EndpointInfo(owner=self._replica.replica_id, rank=0, node="memory", address={"session": session}),)

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Make the replica invalid, and report what a real transfer would have."""
        self._replica.invalidate()
        self.enter("transfer")
        await self.pass_time()
        if self.aborted.is_set():
            raise StateError("the transfer was aborted")
        return (_report(self._replica.replica_id, plan),)

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        """Make `version` the replica's."""
        self.enter("commit")
        self._replica.commit(version, keep_cache=keep_cache)

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer under way."""
        self.enter("abort")
        self.aborted.set()

    async def close(self, *, deadline: Deadline) -> None:
        """Do nothing."""
        self.enter("close")


class ScriptedSenderHost(_Host):
    """A trainer without weights: three tensors whose digests depend on the version."""

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        """Describe the tensors."""
        self.enter("prepare")
        self.aborted.clear()
        tensors = tuple(TensorMeta(name=name, shape=(4,), dtype="float32") for name in _TENSORS)
        manifest = Manifest(version=version, tensors=tensors, num_bytes=16 * len(tensors))
        return manifest, (EndpointInfo(owner="trainer", rank=0, node="memory", address={"session": session}),)

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Report what a real transfer would have."""
        self.enter("transfer")
        await self.pass_time()
        if self.aborted.is_set():
            raise StateError("the transfer was aborted")
        return (_report("trainer", plan),)

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer under way."""
        self.enter("abort")
        self.aborted.set()

    async def close(self, *, deadline: Deadline) -> None:
        """Do nothing."""
        self.enter("close")


if TYPE_CHECKING:

    def _is_receiver_host(x: ScriptedReceiverHost) -> WeightReceiverHost:
        return x

    def _is_sender_host(x: ScriptedSenderHost) -> WeightSenderHost:
        return x
