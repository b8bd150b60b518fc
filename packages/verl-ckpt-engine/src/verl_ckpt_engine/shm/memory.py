"""Memory that other processes of this machine can map, and that nobody can leave behind.

Owns where such memory comes from, how another process finds it, and when it goes. On Linux it has no name: others open
``/proc/<pid>/fd/<n>`` of its maker, and the kernel frees it with the last process that holds it, however that process
ends. A named file would outlive a maker that was killed, and fill `/dev/shm`, which is small in containers.

Where the system has no nameless memory, a temporary file stands in. Its maker removes it; files of makers that were
killed are removed when the next one is made.

The mapping is not made through `multiprocessing.shared_memory`: its resource tracker would unlink the memory when any
one process that uses it exits.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import tempfile
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verl_ckpt_engine.shm.waiting import ProcessId, process_scope

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FILE_PREFIX", "PAGE", "SharedMemory"]

PAGE = 4096
FILE_PREFIX = "verl-weights-"
"""Begins the name of each temporary file."""
_CHUNK = 1024 * 1024
_MADV_POPULATE_WRITE = 23


class SharedMemory:
    """One piece of memory, mapped as bytes, as 64-bit words and as a tensor.

    There is nothing to close: others can map it as long as its maker keeps this object, and it is unmapped once neither
    the object nor a view of it exists. So whoever still writes to it, late, writes to nothing else.
    """

    def __init__(self, descriptor: int, path: Path, *, named: bool = False) -> None:
        """Use `create` or `open`."""
        self.named = named
        """Whether it has a name that must be removed."""
        self._descriptor = descriptor
        self._path = path
        found = os.fstat(descriptor)
        self._identity = _identity(found)
        self._close = weakref.finalize(self, _close, descriptor, path if named else None, os.getpid())
        self._populated = bytearray()
        self._map(found.st_size)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Return new memory, all zeros."""
        if not hasattr(os, "memfd_create"):
            return cls._create_named(num_bytes)
        descriptor = os.memfd_create("verl-weights")
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, Path(f"/proc/{os.getpid()}/fd/{descriptor}"))

    @classmethod
    def _create_named(cls, num_bytes: int) -> SharedMemory:
        folder = Path(tempfile.gettempdir())
        prefix = f"{FILE_PREFIX}{process_scope()}-"
        _remove_orphans(folder, prefix)
        path = folder / f"{prefix}{ProcessId.of_this_process()}-{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, path, named=True)

    @classmethod
    def open(cls, address: Mapping[str, str]) -> SharedMemory:
        """Map memory of another process, or of this one. Raises OSError when it is gone or cannot be reached."""
        path, identity = Path(address["memory"]), address["identity"]
        # Looked at before it is opened: opening what merely has its number now, a pipe say, could do anything.
        if _identity(path.stat()) != identity:
            raise FileNotFoundError(f"{path} is something else now")
        memory = cls(os.open(path, os.O_RDWR), path)
        if memory._identity != identity:
            raise FileNotFoundError(f"{path} is something else now")
        memory._close()  # the mapping is enough
        return memory

    @property
    def address(self) -> dict[str, str]:
        """What `open` needs."""
        return {"memory": str(self._path), "identity": self._identity}

    def is_at(self, address: Mapping[str, str]) -> bool:
        """Return whether this is the memory at that address."""
        return self.address.items() <= address.items()

    def __len__(self) -> int:
        return len(self.bytes)

    def grow(self, num_bytes: int) -> None:
        """Make it at least `num_bytes` long. Its maker's; what others have mapped stays as it is."""
        if num_bytes > len(self):
            os.ftruncate(self._descriptor, num_bytes)
            self._map(num_bytes)

    def populate(self, start: int, stop: int) -> None:
        """Make sure that these bytes have memory: asked for a MiB at once it is several times cheaper than by page."""
        for chunk in range(start // _CHUNK, -(-stop // _CHUNK)):
            if not self._populated[chunk]:
                self._populated[chunk] = True
                if sys.platform == "linux":
                    with suppress(OSError):  # a kernel older than 5.14
                        length = min(_CHUNK, len(self) - chunk * _CHUNK)
                        self._mapping.madvise(_MADV_POPULATE_WRITE, chunk * _CHUNK, length)

    def unlink(self) -> None:
        """Remove the name, if there is one. The memory stays for those who have it. Idempotent."""
        if self.named:
            self._path.unlink(missing_ok=True)

    def _map(self, num_bytes: int) -> None:
        # Never closed by hand: whatever views the mapping keeps it alive, and the last one to go unmaps it.
        self._mapping = mmap.mmap(self._descriptor, num_bytes)
        self.bytes = memoryview(self._mapping)
        self.words = self.bytes[: num_bytes // 8 * 8].cast("q")
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.start = self.tensor.data_ptr()
        """Address of the first byte in this process."""
        self._populated += bytes(-(-num_bytes // _CHUNK) - len(self._populated))


def _identity(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}"


def _close(descriptor: int, path: Path | None, maker: int) -> None:
    os.close(descriptor)
    if path is not None and os.getpid() == maker:  # not in a forked child
        path.unlink(missing_ok=True)


def _remove_orphans(folder: Path, prefix: str) -> None:
    """Remove files whose maker is dead. `prefix` holds only makers whom we can see, or could if they lived."""
    for path in folder.glob(f"{prefix}*"):
        maker, _, _ = path.name.removeprefix(prefix).partition("-")
        with suppress(OSError, ValueError):  # another user's, or no file of ours
            if not ProcessId.parse(maker).alive():
                path.unlink(missing_ok=True)
                logging.getLogger(__name__).info("removed %s, which process %s left behind", path, maker)
