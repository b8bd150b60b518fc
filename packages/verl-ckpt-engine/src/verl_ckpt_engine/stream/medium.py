"""What a backend of the stream brings: memory, and a way to move it from a parent to a child.

The stream knows when a bucket is ready and when its slot is free; a medium knows nothing but bytes. Its calls block, on
a thread of the edge's own, and raise what goes wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from verl_contracts.clock import Clock, Deadline

__all__ = ["Inlet", "Medium", "Outlet"]


class Outlet(Protocol):
    """A parent's end of an edge."""

    @property
    def address(self) -> Mapping[str, str]:
        """Return what the child needs to connect."""
        ...

    def open(self, deadline: Deadline) -> None:
        """Meet the child, which has the address by now."""
        ...

    def push(self, data: torch.Tensor, deadline: Deadline) -> None:
        """Send `data`, bytes of a slot; return when it can be written over. Does nothing where the child fetches it."""
        ...

    def cut(self) -> None:
        """Make a call that blocks raise soon. From any thread."""
        ...

    def close(self) -> None:
        """Give everything back, on the edge's thread."""
        ...


class Inlet(Protocol):
    """A child's end of an edge."""

    def open(self, deadline: Deadline) -> None:
        """Meet the parent."""
        ...

    def pull(self, place: Mapping[str, str], slot: int, into: torch.Tensor, deadline: Deadline) -> None:
        """Fill `into` with the beginning of the parent's slot; `place` is where the parent said its slots are."""
        ...

    def cut(self) -> None:
        """Make a call that blocks raise soon. From any thread."""
        ...

    def close(self) -> None:
        """Give everything back, on the edge's thread."""
        ...


class Medium(Protocol):
    """One rank's access to a transport. Made once for each sender or receiver."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory, as bytes, that edges can read from and write to."""
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Let it go."""
        ...

    def place(self, slots: Sequence[torch.Tensor]) -> Mapping[str, str]:
        """Return what a child needs in order to fetch from `slots`."""
        ...

    def outlet(self, host: str, clock: Clock) -> Outlet:
        """Make a parent's end of a new edge, on the network interface of `host`."""
        ...

    def inlet(self, host: str, address: Mapping[str, str], clock: Clock) -> Inlet:
        """Make the child's end of the edge whose outlet has `address`."""
        ...

    def close(self) -> None:
        """Give back what the rank holds."""
        ...
