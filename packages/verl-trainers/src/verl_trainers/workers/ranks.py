"""How the ranks of one policy find each other.

Rank 0 opens a store on a port that the system chooses and keeps it, so no port can be taken by somebody else between
its choice and its use.
"""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed offers them without types

from verl_contracts.errors import ConfigError

__all__ = ["claim_process", "join_ranks", "leave_ranks", "open_rendezvous", "own_address"]

_SEAT = threading.Lock()
"""Held by the one rank that this process may be."""


def claim_process(*, rank: int, world_size: int) -> None:
    """Take this process for `rank`, before anything waits for other ranks. Raises `ConfigError` when it is taken."""
    if world_size > 1 and not _SEAT.acquire(blocking=False):
        raise ConfigError(
            f"rank {rank} of {world_size}: this process is a rank already, and each needs a process of its own; set "
            "runtime=ray or trainer.n_gpus_per_node=1"
        )


def leave_ranks(*, world_size: int) -> None:
    """Undo `claim_process` and `join_ranks`. Call it once for each claim."""
    if world_size > 1:
        if dist.is_initialized():
            dist.destroy_process_group()
        _SEAT.release()


def own_address() -> str:
    """Return an address of this host that its neighbours can reach; the loopback's when there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the system only picks the interface
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def open_rendezvous(world_size: int, *, limit_s: float) -> TCPStore:
    """Return the store that the other ranks connect to; its `host` and `port` say where."""
    return TCPStore(
        own_address(), 0, world_size, is_master=True, timeout=timedelta(seconds=limit_s), wait_for_workers=False
    )


def join_ranks(store: Store | str, *, rank: int, world_size: int, device: str, limit_s: float) -> None:
    """Make this process rank `rank` of `world_size`. Blocks until all have come, at most `limit_s`.

    Args:
        store: What `open_rendezvous` returned, on rank 0; its ``host:port`` elsewhere.
        rank: From 0.
        world_size: All ranks.
        device: Decides the transport: NCCL for CUDA, else gloo.
        limit_s: Longest that any collective may take from now on.
    """
    limit = timedelta(seconds=limit_s)
    if isinstance(store, str):
        host, _, port = store.rpartition(":")
        store = TCPStore(host, int(port), world_size, is_master=False, timeout=limit)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
