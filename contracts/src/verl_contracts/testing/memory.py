"""`MemoryBackend`: weights from thread to thread of one process. The smallest backend that meets the contract.

For tests of everything around a backend. It moves whole tensors, so `bucket_bytes` has nothing to bound.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from verl_contracts.errors import ConfigError, WeightSyncError
from verl_contracts.testing.tensors import payload
from verl_contracts.weights import EndpointInfo, Plan, TransferReport, WireFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import (
        Manifest,
        TensorMeta,
        TopologyPlanner,
        WeightBackend,
        WeightReceiver,
        WeightSender,
        WeightSource,
        WeightTarget,
    )

__all__ = ["MemoryBackend", "MemoryPlanner", "MemoryReceiver", "MemorySender"]

_WINDOW = 4
"""Tensors that may be under way to one receiver."""


@dataclass(slots=True)
class _Channel:
    """What a sender and the receivers of one session share. `changed` guards the rest."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queues: dict[str, deque[tuple[TensorMeta, torch.Tensor] | None]] = field(default_factory=dict)
    """Receiver → tensors under way; None ends the stream."""
    failed: dict[str, str] = field(default_factory=dict)
    """Receiver → what it said."""
    done: set[str] = field(default_factory=set)
    aborted: str | None = None

    def wait(self, ready: Callable[[], bool], *, deadline: Deadline, clock: Clock) -> bool:
        """Wait, with `changed` held, until `ready`; False at the deadline."""
        return self.changed.wait_for(ready, timeout=deadline.remaining(clock))


_CHANNELS: dict[str, _Channel] = {}


def _digest(tensor: torch.Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(payload(tensor), digest_size=8).digest(), "big")


class MemorySender:
    """Puts copies into the queue of each receiver."""

    def __init__(self, *, owner: str, rank: int, clock: Clock) -> None:
        self._owner = owner
        self._rank = rank
        self._clock = clock
        self._session: str | None = None
        self._channel: _Channel | None = None

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Make the channel."""
        self._session = session
        self._channel = _CHANNELS[session] = _Channel()
        return EndpointInfo(owner=self._owner, rank=self._rank, node="memory", address={"session": session})

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Send everything to those receivers that do not fail; raises when none is left."""
        if self._channel is None:
            raise WeightSyncError("transfer", "prepare was not called")
        channel, began = self._channel, self._clock.now()
        names = [_name(endpoint) for endpoint in plan.receivers]
        digests: dict[str, int] = {}
        num_bytes = 0
        try:
            for meta, tensor in source.tensors():
                copy = tensor.detach().clone()
                digests[meta.name] = _digest(copy)
                num_bytes += copy.numel() * copy.element_size()
                self._push(channel, names, (meta, copy), deadline)
            if len(digests) != len(plan.manifest.tensors):
                raise WeightSyncError(
                    "transfer", f"the source gave {len(digests)} tensors of {len(plan.manifest.tensors)}"
                )
            self._push(channel, names, None, deadline)
            self._finish(channel, names, deadline)
        except BaseException as exc:
            with channel.changed:
                channel.aborted = channel.aborted or f"the sender failed: {exc}"
                channel.changed.notify_all()
            raise
        return TransferReport(
            owner=self._owner,
            rank=self._rank,
            tensors=len(digests),
            num_bytes=num_bytes,
            seconds=self._clock.now() - began,
            digests=digests,
        )

    def _push(
        self,
        channel: _Channel,
        names: Sequence[str],
        item: tuple[TensorMeta, torch.Tensor] | None,
        deadline: Deadline,
    ) -> None:
        tensor = item[0].name if item is not None else None
        for name in names:

            def has_place(name: str = name) -> bool:
                free = name in channel.queues and len(channel.queues[name]) < _WINDOW
                return free or name in channel.failed or channel.aborted is not None

            with channel.changed:
                if not channel.wait(has_place, deadline=deadline, clock=self._clock):
                    raise WeightSyncError("transfer", "the deadline passed", tensor, (name,))
                self._check(channel, names, tensor)
                if name not in channel.failed:
                    channel.queues[name].append(item)
                    channel.changed.notify_all()

    def _finish(self, channel: _Channel, names: Sequence[str], deadline: Deadline) -> None:
        def settled() -> bool:
            return channel.aborted is not None or set(names) <= channel.done | channel.failed.keys()

        with channel.changed:
            if not channel.wait(settled, deadline=deadline, clock=self._clock):
                missing = tuple(name for name in names if name not in channel.done | channel.failed.keys())
                raise WeightSyncError("transfer", "the deadline passed", None, missing)
            self._check(channel, names, None)

    def _check(self, channel: _Channel, names: Sequence[str], tensor: str | None) -> None:
        if channel.aborted is not None:
            raise WeightSyncError("transfer", channel.aborted, tensor)
        if set(names) <= channel.failed.keys():
            reasons = "; ".join(f"{name}: {reason}" for name, reason in channel.failed.items())
            raise WeightSyncError("transfer", f"every receiver failed: {reasons}", tensor, tuple(channel.failed))

    def abort(self, reason: str, /) -> None:
        """End the session on both sides."""
        if self._channel is not None:
            with self._channel.changed:
                self._channel.aborted = reason
                self._channel.changed.notify_all()

    def close(self) -> None:
        """Forget the channel."""
        if self._session is not None:
            self.abort("the sender closed")
            _CHANNELS.pop(self._session, None)
            self._session = self._channel = None


class MemoryReceiver:
    """Takes tensors from its queue."""

    def __init__(self, *, owner: str, clock: Clock) -> None:
        self._owner = owner
        self._clock = clock
        self._rank = 0
        self._channel: _Channel | None = None
        self._aborted: str | None = None

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Remember which receiver this is."""
        self._rank = rank
        self._aborted = None
        return EndpointInfo(owner=self._owner, rank=rank, node="memory", address={"session": session})

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole stream."""
        began, name = self._clock.now(), _name_of(self._owner, self._rank)
        channel = _CHANNELS.get(plan.session)
        if channel is None:
            raise WeightSyncError("transfer", f"there is no session {plan.session!r}", None, ("trainer",))
        self._channel = channel
        with channel.changed:
            channel.queues.setdefault(name, deque())
            channel.changed.notify_all()
        digests: dict[str, int] = {}
        counts = [0]
        try:
            report = target.load(self._items(channel, name, plan, digests, counts, deadline))
            if len(digests) != len(plan.manifest.tensors):
                raise WeightSyncError(
                    "transfer", f"the stream ended after {len(digests)} tensors of {len(plan.manifest.tensors)}"
                )
        except BaseException as exc:
            with channel.changed:
                channel.failed[name] = f"{type(exc).__name__}: {exc}"
                channel.changed.notify_all()
            if isinstance(exc, WeightSyncError) or not isinstance(exc, Exception):
                raise
            raise WeightSyncError("transfer", f"loading failed: {type(exc).__name__}: {exc}") from exc
        with channel.changed:
            channel.done.add(name)
            channel.changed.notify_all()
        return TransferReport(
            owner=self._owner,
            rank=self._rank,
            tensors=len(digests),
            num_bytes=counts[0],
            seconds=self._clock.now() - began,
            digests=digests,
            skipped=report.skipped,
        )

    def _items(
        self,
        channel: _Channel,
        name: str,
        plan: Plan,
        digests: dict[str, int],
        counts: list[int],
        deadline: Deadline,
    ) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        queue = channel.queues[name]
        while True:
            with channel.changed:

                def ready() -> bool:
                    return bool(queue) or channel.aborted is not None or self._aborted is not None

                if not channel.wait(ready, deadline=deadline, clock=self._clock):
                    senders = tuple(_name(endpoint) for endpoint in plan.senders)
                    raise WeightSyncError("transfer", "the deadline passed", None, senders)
                if channel.aborted is not None or self._aborted is not None:
                    raise WeightSyncError("transfer", channel.aborted or self._aborted or "")
                item = queue.popleft()
                channel.changed.notify_all()
            if item is None:
                return
            meta, tensor = item
            digests[meta.name] = _digest(tensor)
            counts[0] += tensor.numel() * tensor.element_size()
            yield meta, tensor

    def abort(self, reason: str, /) -> None:
        """Make a blocked `receive` raise."""
        self._aborted = reason
        if self._channel is not None:
            with self._channel.changed:
                self._channel.changed.notify_all()

    def close(self) -> None:
        """Forget the channel."""
        self._channel = None


class MemoryPlanner:
    """One sender sends to all."""

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
        """Return the plan; refuses endpoints of other backends, and all but one sender."""
        if len(senders) != 1:
            raise ConfigError(f"the memory backend has one sender, got {[_name(endpoint) for endpoint in senders]}")
        for endpoint in [*senders, *receivers]:
            if endpoint.node != "memory":
                raise ConfigError(f"the memory backend cannot reach {_name(endpoint)} on {endpoint.node!r}")
        return Plan(
            session=session,
            version=manifest.version,
            manifest=manifest,
            senders=tuple(senders),
            receivers=tuple(receivers),
            bucket_bytes=bucket_bytes,
        )


class MemoryBackend:
    """Threads of one process."""

    sender_class: ClassVar[type[WeightSender]] = MemorySender
    receiver_class: ClassVar[type[WeightReceiver]] = MemoryReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = MemoryPlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WireFormat(format_id="memory", version=1),)


def _name(endpoint: EndpointInfo) -> str:
    return _name_of(endpoint.owner, endpoint.rank)


def _name_of(owner: str, rank: int) -> str:
    return f"{owner}[{rank}]"


if TYPE_CHECKING:

    def _is_sender(x: MemorySender) -> WeightSender:
        return x

    def _is_receiver(x: MemoryReceiver) -> WeightReceiver:
        return x

    def _is_planner(x: MemoryPlanner) -> TopologyPlanner:
        return x

    def _is_backend(x: MemoryBackend) -> WeightBackend:
        return x
