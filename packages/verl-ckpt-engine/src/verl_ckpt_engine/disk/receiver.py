"""The reading side: one engine rank. It reads each shard as soon as it is there, while the sender writes the next."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from verl_ckpt_engine.disk.incoming import IncomingFolder
from verl_ckpt_engine.disk.reading import Memory
from verl_ckpt_engine.shm.waiting import ProcessId, process_scope
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo

if TYPE_CHECKING:
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Plan, TransferReport, WeightReceiver, WeightTarget

__all__ = ["DiskReceiver"]


class DiskReceiver:
    """One engine rank of the disk backend."""

    def __init__(self, *, owner: str, clock: Clock) -> None:
        """Make a receiver; create nothing yet."""
        self._owner = owner
        self._clock = clock
        self._rank = 0
        self._lock = threading.Lock()
        self._session: str | None = None
        self._folder: IncomingFolder | None = None
        self._refused: str | None = None
        """Why nothing may be received: it was aborted before it began."""
        self._memory = Memory()

    def prepare(self, *, session: str, rank: int) -> EndpointInfo:
        """Say who we are; the folder is the sender's."""
        self.close()
        with self._lock:
            self._session, self._rank, self._refused = session, rank, None
        address = {"process": str(ProcessId.of_this_process()), "scope": process_scope()}
        return EndpointInfo(owner=self._owner, rank=rank, node=socket.gethostname(), address=address)

    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        """Load the whole version. Raises `WeightSyncError` for a cut, corrupt or incomplete one."""
        begun = self._clock.now()
        folder = self._begin(plan, deadline)
        try:
            folder.enter()
            load = target.load(folder.items())
            folder.tally.check_load(load)
            folder.finish()
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else folder.tally.error(f"{type(exc).__name__}: {exc}")
            folder.stop(str(error))
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        finally:
            folder.leave()
        with self._lock:
            self._memory = folder.memory  # else another one may still be read into
        return folder.tally.report(self._owner, self._rank, self._clock.now() - begun, load.skipped)

    def abort(self, reason: str, /) -> None:
        """Make a blocked `receive` raise, and tell the sender."""
        self._stop(f"aborted: {reason}")

    def close(self) -> None:
        """End the session; a sender that still waits for us is told. Idempotent, legal in every state."""
        self._stop("the receiver closed before the end")
        with self._lock:
            self._session = self._folder = None

    def _begin(self, plan: Plan, deadline: Deadline) -> IncomingFolder:
        with self._lock:
            if self._session != plan.session:
                raise StateError(f"receive for session {plan.session!r}, but {self._session!r} was prepared")
            if self._folder is not None:
                raise StateError(f"session {plan.session!r} was received already; prepare another one")
            if (self._owner, self._rank) not in [(endpoint.owner, endpoint.rank) for endpoint in plan.receivers]:
                raise WeightSyncError("transfer", f"{self._owner} rank {self._rank} is not in the plan")
            memory, self._memory = self._memory, Memory()
            folder = self._folder = IncomingFolder(plan, self._owner, self._rank, memory, self._clock, deadline)
            if self._refused is not None:
                folder.stop(self._refused)
            return folder

    def _stop(self, reason: str) -> None:
        with self._lock:
            if self._folder is not None:
                self._folder.stop(reason)
            elif self._session is not None:
                self._refused = self._refused or reason


if TYPE_CHECKING:

    def _is_receiver(x: DiskReceiver) -> WeightReceiver:
        return x
