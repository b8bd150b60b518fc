"""The `shm` backend: one host, one writing rank, any number of reading ranks, one ring in shared memory.

`memory` is what processes share. `ring` is the sender's, with `geometry` for its places and `frames` for what a frame
says; `page` is each reader's. `sender` and `receiver` are the two roles, `outgoing` and `incoming` one transfer of
each, `audience` the readers of one send, `waiting` how both sides wait. Nothing here knows replicas or transactions;
see `verl_ckpt_engine.manager`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from verl_ckpt_engine.planner import SingleHostPlanner
from verl_ckpt_engine.shm.frames import WIRE_FORMAT
from verl_ckpt_engine.shm.receiver import ShmReceiver
from verl_ckpt_engine.shm.sender import ShmSender

if TYPE_CHECKING:
    from verl_contracts.weights import TopologyPlanner, WeightBackend, WeightReceiver, WeightSender, WireFormat

__all__ = ["ShmBackend", "ShmReceiver", "ShmSender"]


class ShmBackend:
    """Moves weights between processes of one host through shared memory."""

    sender_class: ClassVar[type[WeightSender]] = ShmSender
    receiver_class: ClassVar[type[WeightReceiver]] = ShmReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = SingleHostPlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WIRE_FORMAT,)


if TYPE_CHECKING:

    def _is_backend(x: ShmBackend) -> WeightBackend:
        return x
