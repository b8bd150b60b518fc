"""The writing side: one trainer rank, its session, and the versions that it keeps for those who come late."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from verl_ckpt_engine.disk.folders import VersionFolder, begin_version, find_root, prune, remove, sweep
from verl_ckpt_engine.disk.outgoing import OutgoingFolder
from verl_ckpt_engine.disk.seats import FAIL
from verl_ckpt_engine.disk.shards import build_shards
from verl_ckpt_engine.shm.waiting import ProcessId, process_scope
from verl_ckpt_engine.tally import SentTally
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.weights import EndpointInfo

if TYPE_CHECKING:
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import Manifest, Plan, TransferReport, WeightSender, WeightSource

__all__ = ["KEEP", "DiskSender"]

KEEP: Final = 1
"""Complete versions that stay for those who come late."""

_log = logging.getLogger(__name__)


class _Session:
    """One sync of a sender, with the folder that it writes; rank 0 alone has one."""

    def __init__(self, name: str, folder: VersionFolder | None) -> None:
        self.name = name
        self.folder = folder
        self.stopped: str | None = None
        self.begun = False
        self.sent: OutgoingFolder | None = None
        """What everybody who is left has loaded."""
        self._lock = threading.Lock()

    def stop(self, reason: str) -> None:
        """Make a send that runs raise, and tell the receivers; harmless when it is over."""
        with self._lock:
            if self.sent is not None or self.stopped is not None:
                return
            self.stopped = reason
            if self.folder is not None:
                with suppress(OSError):  # on a full disk the words are lost; a folder that is gone tells enough
                    self.folder.seat.become(FAIL, reason)

    def finish(self, sent: OutgoingFolder) -> None:
        """Note that everything was sent. Raises `WeightSyncError` when it was stopped meanwhile."""
        with self._lock:
            if self.stopped is not None:
                raise sent.tally.error(self.stopped)
            self.sent = sent

    def close(self) -> OutgoingFolder | None:
        """End it; return what was sent, None if it had not come to its end."""
        self.stop("the sender closed before the end")
        with self._lock:
            sent, self.sent = self.sent, None
            self.stopped = self.stopped or "the sender closed"
            return sent


class DiskSender:
    """One trainer rank of the disk backend: rank 0 writes, the others only take part in gathering."""

    def __init__(self, *, owner: str, rank: int, clock: Clock, keep: int = KEEP) -> None:
        """Make a sender; create nothing yet. The newest `keep` versions stay after `close`, and after the process."""
        self._owner = owner
        self._rank = rank
        self._clock = clock
        self._keep = keep
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._kept: list[VersionFolder] = []

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        """Make the session's folder, and remove those of senders that were killed.

        Raises `ConfigError` for a root that cannot be used and `WeightSyncError` for one without room, both before
        any replica is paused.
        """
        self.close()
        address = {"process": str(ProcessId.of_this_process()), "scope": process_scope()}
        folder: VersionFolder | None = None
        if self._rank == 0:
            build_shards(manifest, 1)  # a type that files cannot hold is refused here
            root = find_root()
            sweep(root)
            folder = begin_version(root, manifest.version, session, manifest.num_bytes)
            address["folder"] = str(folder.path)
        with self._lock:
            self._session = _Session(session, folder)
        return EndpointInfo(owner=self._owner, rank=self._rank, node=socket.gethostname(), address=address)

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        """Write everything. Raises `WeightSyncError` naming the missing peers, at the deadline at the latest.

        Returns when every receiver that is left has said that it loaded everything.
        """
        session = self._begin(plan)
        begun = self._clock.now()
        if session.folder is None:
            self._drain(session, source, deadline)
            return SentTally(plan).report(self._owner, self._rank, self._clock.now() - begun)
        folder = OutgoingFolder(session.folder.path, plan, self._clock, deadline, stopped=lambda: session.stopped)
        items = source.tensors()
        try:
            for meta, tensor in items:
                folder.write(meta, tensor)
            folder.end()
            session.finish(folder)
        except BaseException as exc:
            error = exc if isinstance(exc, WeightSyncError) else folder.tally.error(f"{type(exc).__name__}: {exc}")
            folder.discard()
            session.stop(error.reason)
            if len(plan.senders) > 1:
                # The other ranks gather until their iteration ends; leaving now would block them.
                for _ in items:
                    pass
            if error is exc or not isinstance(exc, Exception):
                raise
            raise error from exc
        return folder.tally.report(self._owner, self._rank, self._clock.now() - begun)

    def abort(self, reason: str, /) -> None:
        """Make a blocked `send` raise, and tell the receivers."""
        session = self._session
        if session is not None:
            session.stop(f"aborted: {reason}")

    def close(self) -> None:
        """End the session; receivers that still read are told. Idempotent, legal in every state.

        A version that was sent well is made complete, and older ones go; one that was not is removed at once.
        """
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
            sent = session.close()
            if session.folder is None:
                return
            if sent is not None and self._seal(session.folder, sent):
                self._kept = prune(session.folder.path.parent, [*self._kept, session.folder], self._keep)
            else:
                remove(session.folder.path)
                session.folder.seat.leave()

    def _begin(self, plan: Plan) -> _Session:
        with self._lock:
            session = self._session
            if session is None or session.name != plan.session:
                prepared = None if session is None else session.name
                raise StateError(f"the plan is for session {plan.session!r}, and {prepared!r} was prepared")
            if session.begun:
                raise StateError(f"session {plan.session!r} was sent already; prepare another one")
            session.begun = True
            return session

    def _seal(self, folder: VersionFolder, sent: OutgoingFolder) -> bool:
        """Make a version complete. One that cannot be is no failure of the sync, for its receivers have it."""
        try:
            sent.seal()
        except OSError as exc:
            _log.warning("%s was loaded, and cannot be kept for those who come late: %s", folder.path, exc)
            return False
        return True

    def _drain(self, session: _Session, source: WeightSource, deadline: Deadline) -> None:
        for meta, _ in source.tensors():
            if session.stopped is not None:
                raise WeightSyncError("transfer", session.stopped, meta.name)
            if not deadline.remaining(self._clock):
                raise WeightSyncError("transfer", f"not gathered within {deadline.limit_s:.3g} s", meta.name)


if TYPE_CHECKING:

    def _is_sender(x: DiskSender) -> WeightSender:
        return x
