"""`RayCaller`: calls and payloads, from the driver and from inside actors alike."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from verl_contracts.clock import Clock, Deadline
from verl_contracts.errors import ActorFailed, ConfigError
from verl_contracts.failures import FailureRecord
from verl_contracts.runtime import PayloadRef
from verl_contracts.waits import bounded
from verl_runtime.ray.autopsy import describe_death, oom_kills, read_tail
from verl_runtime.ray.connection import require_connection
from verl_runtime.ray.elsewhere import run_on_node
from verl_runtime.ray.port import Port
from verl_runtime.ray.wire import RayAddress, pack, unpack

if TYPE_CHECKING:
    import pickle
    from collections.abc import Mapping, Sequence

    from ray import ObjectRef

    from verl_contracts.runtime import ActorRef, Caller
    from verl_runtime.ray.port import Exchange

__all__ = ["RayCaller"]

_log = logging.getLogger(__name__)
_TAIL_LIMIT_S = 5.0
_INSIDE_BYTES = 64 * 1024
"""Values up to this size travel inside their reference, as bytes, so that passing them on costs nothing."""
_INSIDE = "inside"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A value in Ray's store: bytes and buffers there, the references inside it here."""

    stored: ObjectRef[object]
    refs: tuple[ObjectRef[object], ...]


class RayCaller:
    """Calls actors by name. Used from one event loop."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._ports: dict[str, Port] = {}
        self._oom_kills = oom_kills()

    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        """Call a method of an actor in this cluster; calls of one tick travel together."""
        return await (await self._port(actor)).call(method, arguments, deadline=deadline)

    async def put(self, value: object, /) -> PayloadRef:
        """Keep the value inside the reference when small, else in this node's store."""
        require_connection()
        import ray

        packed = pack(value, outside=True)
        num_bytes = len(packed.data) + sum(len(buffer.raw()) for buffer in packed.buffers)
        if num_bytes <= _INSIDE_BYTES and not packed.refs:
            inside = packed.data if not packed.buffers else pack(value).data
            return PayloadRef(num_bytes=num_bytes, value=inside, token=_INSIDE)
        stored: ObjectRef[object] = ray.put((packed.data, packed.buffers))
        return PayloadRef(num_bytes=num_bytes, token=_Stored(stored, packed.refs))

    async def get(self, ref: PayloadRef, /, *, deadline: Deadline) -> object:
        """Return the value; arrays in it are writable copies."""
        if ref.token == _INSIDE and isinstance(ref.value, bytes):
            return unpack(ref.value, ())
        if not isinstance(ref.token, _Stored):
            return ref.value
        require_connection()
        try:
            held = await bounded(
                ref.token.stored,
                subject=f"payload of {ref.num_bytes} bytes",
                holder="the process that put it",
                deadline=deadline,
                clock=self._clock,
            )
        except self._lost_errors() as exc:
            cause = f"a payload of {ref.num_bytes} bytes is lost, because the process that kept it is gone"
            raise ActorFailed(FailureRecord(role="payload", rank=0, node="unknown node", cause=cause)) from exc
        data, buffers = cast("tuple[bytes, Sequence[pickle.PickleBuffer]]", held)
        return unpack(data, ref.token.refs, buffers=[bytearray(buffer) for buffer in buffers])

    def open_port(self, actor: ActorRef, exchange: Exchange) -> Port:
        """Connect an actor whose handle is known."""
        port = Port(actor, exchange, clock=self._clock, examine=self.examine)
        self._ports[actor.name] = port
        return port

    def exchanges(self, actor: ActorRef) -> int:
        """Return how many remote calls went to `actor`."""
        port = self._ports.get(actor.name)
        return port.exchanges if port is not None else 0

    def fail(self, actor: ActorRef, record: FailureRecord) -> None:
        """Fail pending and later calls of an actor."""
        if (port := self._ports.get(actor.name)) is not None:
            port.fail(record)

    async def examine(self, actor: ActorRef, error: BaseException) -> FailureRecord:
        """Describe why `actor` is gone."""
        lines = await self._last_lines(actor)
        return describe_death(actor, error, lines=lines, oom_kills_since=oom_kills() - self._oom_kills)

    async def _last_lines(self, actor: ActorRef) -> tuple[str, ...]:
        address = actor.token
        if not isinstance(address, RayAddress):
            return ()
        lines = await asyncio.to_thread(read_tail, address.log_path)
        if lines or not address.node_id or address.node == socket.gethostname():
            return lines
        try:
            return await bounded(
                run_on_node(address.node_id, read_tail, address.log_path),
                subject=f"last lines of {actor.name}",
                holder=address.node,
                deadline=Deadline.after(self._clock, _TAIL_LIMIT_S),
                clock=self._clock,
            )
        except Exception as exc:  # the node is gone as well: its lines are lost, the failure is still reported
            _log.debug("no last lines of %s: %s", actor.name, exc)
            return ()

    async def _port(self, actor: ActorRef) -> Port:
        known = self._ports.get(actor.name)
        if known is not None:
            return known
        require_connection()
        import ray

        if not isinstance(actor.token, RayAddress):
            raise ConfigError(f"actor {actor.name} was not spawned by a RayRuntime; use its own runtime's caller")
        try:
            handle = ray.get_actor(actor.name, namespace=actor.token.namespace)
        except ValueError as exc:
            raise ActorFailed(await self.examine(actor, exc)) from exc
        return self.open_port(actor, cast("Exchange", handle.exchange))

    @staticmethod
    def _lost_errors() -> tuple[type[Exception], ...]:
        from ray.exceptions import ObjectLostError, RayActorError, RaySystemError

        return (ObjectLostError, RayActorError, RaySystemError)


if TYPE_CHECKING:

    def _is_caller(x: RayCaller) -> Caller:
        return x
