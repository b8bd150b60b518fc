"""What travels between callers and hosts, and how values become bytes.

Values are pickled here, one call at a time, and not by Ray: an argument that cannot be pickled fails its own call and
not the others that travel with it, arrays arrive writable, and errors arrive as the type that was raised. References to
objects in Ray's store are kept apart from the bytes, because Ray must see them to count them.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from verl_contracts.errors import ActorFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ray import ObjectRef

    from verl_contracts.failures import FailureRecord

    Reducers = dict[type, Callable[[object], tuple[Callable[..., object], tuple[object, ...]]]]

__all__ = [
    "Boot",
    "CallRow",
    "Packed",
    "Packet",
    "RayAddress",
    "ReplyRow",
    "pack",
    "pack_calls",
    "pack_error",
    "pack_replies",
    "unpack",
    "unpack_calls",
    "unpack_replies",
    "unpack_reply",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAddress:
    """How any process of the run finds an actor, and the log of one that is gone."""

    namespace: str
    log_path: str
    node: str = "unknown node"
    """Host name."""
    node_id: str = ""
    """Ray's name of the node, empty until the process is there."""


class Packed(NamedTuple):
    """A value as bytes, the buffers that were too good to copy, and the references inside it."""

    data: bytes
    buffers: tuple[pickle.PickleBuffer, ...]
    refs: tuple[ObjectRef[object], ...]


class CallRow(NamedTuple):
    """One call on its way to a host. Deadlines travel as remaining seconds."""

    number: int
    method: str
    data: bytes
    refs: tuple[ObjectRef[object], ...]
    remaining_s: float
    limit_s: float
    setting: str


class ReplyRow(NamedTuple):
    """One result on its way back; for an error, `record` describes it should the caller be unable to unpickle it."""

    number: int
    data: bytes
    refs: tuple[ObjectRef[object], ...]
    record: FailureRecord | None


class Packet(NamedTuple):
    """Several rows as they cross, in one piece: Ray is slow with many small objects."""

    data: bytes
    refs: tuple[ObjectRef[object], ...]


class Boot(NamedTuple):
    """What a host process is told before it imports anything of the user's."""

    name: str
    role: str
    rank: int
    run_id: str
    namespace: str
    target: bytes
    """The pickled `ObjectSpec`: to be read once `sys_path` is in place."""
    target_refs: tuple[ObjectRef[object], ...]
    sys_path: tuple[str, ...]
    env: dict[str, str]
    log_path: str
    owner_limit_s: float


_REFS: ContextVar[Sequence[object]] = ContextVar("verl_refs")


def _take_ref(index: int) -> object:
    return _REFS.get()[index]


def pack(value: object, *, outside: bool = False) -> Packed:
    """Pickle `value`. With `outside`, large buffers are handed out instead of being copied into the bytes."""
    from ray import ObjectRef

    refs: list[ObjectRef[object]] = []
    buffers: list[pickle.PickleBuffer] = []

    def keep(ref: ObjectRef[object]) -> tuple[Callable[..., object], tuple[int]]:
        refs.append(ref)
        return _take_ref, (len(refs) - 1,)

    def dump(make: Callable[..., pickle.Pickler], reducers: Mapping[type, object]) -> bytes:
        refs.clear()
        buffers.clear()
        file = io.BytesIO()
        pickler = make(file, protocol=5, buffer_callback=buffers.append if outside else None)
        pickler.dispatch_table = cast("Reducers", {**cast("Reducers", reducers), ObjectRef: keep})
        pickler.dump(value)
        return file.getvalue()

    try:
        data = dump(pickle.Pickler, copyreg.dispatch_table)
        by_value = b"__main__" in data
    except Exception:  # a lambda, a local class: what only cloudpickle can carry
        by_value = True
    if by_value:  # several times slower, hence second
        from ray.cloudpickle import CloudPickler

        data = dump(CloudPickler, CloudPickler.dispatch_table)
    return Packed(data, tuple(buffers), tuple(refs))


def unpack(data: bytes, refs: Sequence[object] = (), *, buffers: Sequence[bytearray] = ()) -> object:
    """Undo `pack`."""
    token = _REFS.set(refs)
    try:
        value: object = pickle.loads(data, buffers=buffers)
    finally:
        _REFS.reset(token)
    return value


def pack_calls(rows: Iterable[CallRow]) -> Packet:
    """Put calls into one packet."""
    packed = pack([tuple(row) for row in rows])
    return Packet(packed.data, packed.refs)


def unpack_calls(packet: Packet) -> list[CallRow]:
    """Undo `pack_calls`."""
    return [CallRow._make(row) for row in cast("list[tuple[object, ...]]", unpack(*packet))]


def pack_replies(rows: Iterable[ReplyRow]) -> Packet:
    """Put results into one packet."""
    packed = pack([tuple(row) for row in rows])
    return Packet(packed.data, packed.refs)


def unpack_replies(packet: Packet) -> list[ReplyRow]:
    """Undo `pack_replies`."""
    return [ReplyRow._make(row) for row in cast("list[tuple[object, ...]]", unpack(*packet))]


def pack_error(number: int, error: BaseException, record: FailureRecord) -> ReplyRow:
    """Pickle an error with its remote traceback as a note; one that cannot travel becomes `ActorFailed`."""
    where = f"--- in {record.role}[{record.rank}] on {record.node}:"
    try:
        error.add_note("\n".join([where, *record.lines]))
        packed = pack(error)
        unpack(packed.data, packed.refs)
    except Exception:  # whatever user code raises while it is pickled
        packed = pack(ActorFailed(record))
    return ReplyRow(number, packed.data, packed.refs, record)


def unpack_reply(row: ReplyRow) -> object:
    """Return the result of a call, or raise its error."""
    if row.record is None:
        return unpack(row.data, row.refs)
    try:
        error = unpack(row.data, row.refs)
    except Exception as exc:  # the type of the error cannot be imported here
        raise ActorFailed(row.record) from exc
    raise error if isinstance(error, BaseException) else ActorFailed(row.record)
