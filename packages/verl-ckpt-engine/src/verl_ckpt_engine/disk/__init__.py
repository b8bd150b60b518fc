"""The `disk` backend: weights through a folder that both sides see.

`folders` are the versions under a root, and when they go; `seats` say who is there and how far, `shards` is the format
of the files, `marker` what makes a version complete. `sender` and `receiver` are the two roles, with `audience` the
receivers of one send and `reading` what a folder says, checked. `late` loads a complete version without a sender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from verl_ckpt_engine.disk.folders import FOLDER_VARIABLE, find_root
from verl_ckpt_engine.disk.late import latest_complete, load_folder, manifest_of
from verl_ckpt_engine.disk.marker import WIRE_FORMAT
from verl_ckpt_engine.disk.planner import FolderPlanner
from verl_ckpt_engine.disk.receiver import DiskReceiver
from verl_ckpt_engine.disk.sender import DiskSender

if TYPE_CHECKING:
    from verl_contracts.weights import TopologyPlanner, WeightBackend, WeightReceiver, WeightSender, WireFormat

__all__ = [
    "FOLDER_VARIABLE",
    "DiskBackend",
    "DiskReceiver",
    "DiskSender",
    "find_root",
    "latest_complete",
    "load_folder",
    "manifest_of",
]


class DiskBackend:
    """Moves weights between any machines that share a folder."""

    sender_class: ClassVar[type[WeightSender]] = DiskSender
    receiver_class: ClassVar[type[WeightReceiver]] = DiskReceiver
    planner_class: ClassVar[type[TopologyPlanner]] = FolderPlanner
    wire_formats: ClassVar[tuple[WireFormat, ...]] = (WIRE_FORMAT,)


if TYPE_CHECKING:

    def _is_backend(x: DiskBackend) -> WeightBackend:
        return x
