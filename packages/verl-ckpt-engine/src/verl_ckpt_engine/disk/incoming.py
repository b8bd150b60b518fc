"""One receive under way: our seat in the sender's folder, the shards as they come, the sender's seat."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verl_ckpt_engine.disk.folders import FOLDER_VARIABLE
from verl_ckpt_engine.disk.reading import read_tensors
from verl_ckpt_engine.disk.seats import ACK, FAIL, HERE, SENDER, Seat, is_held, poll, receiver_seat
from verl_ckpt_engine.shm.waiting import process_scope
from verl_ckpt_engine.tally import ReceivedTally
from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from verl_ckpt_engine.disk.reading import Memory
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.errors import WeightSyncError
    from verl_contracts.weights import Plan, TensorMeta

__all__ = ["IncomingFolder"]

_LOOK_EVERY_S: Final = 0.02
"""How often the folder is looked at while there is other work."""
_PEER_EVERY_S: Final = 0.1
"""How often it is asked whether the sender lives."""


class IncomingFolder:
    """Reads one plan's tensors: `enter`, `items`, `finish`, `leave`; `stop` at any time, from any thread."""

    def __init__(self, plan: Plan, owner: str, rank: int, memory: Memory, clock: Clock, deadline: Deadline) -> None:
        sender = plan.senders[0]
        self.memory = memory
        self.tally = ReceivedTally(plan)
        self._folder = Path(sender.address["folder"])
        self._near = sender.address["scope"] == process_scope()
        self._sender = f"{sender.owner} rank {sender.rank}"
        self._who = receiver_seat(owner, rank)
        self._clock = clock
        self._deadline = deadline
        self._lock = threading.Lock()
        self._seat: Seat | None = None
        self._stopped: str | None = None
        self._over = False
        self._looked = self._asked = clock.now()

    def enter(self) -> None:
        """Sit down in the folder, which on another machine may take a moment to be seen."""
        poll(self._folder.is_dir, self._check_unseen)
        with self._lock:
            if self._stopped is None:
                try:
                    self._seat = Seat.take(self._folder, self._who)
                except OSError as exc:
                    raise self._error(f"nothing can be written to {self._folder}: {exc.strerror}") from exc
        self._check_stopped()

    def items(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield each tensor, valid until the next; check everything on the way."""
        return read_tensors(
            self._folder, self.tally, self.memory, await_shard=self._await, check=lambda: self._check(often=False)
        )

    def finish(self) -> None:
        """Tell the sender that everything is loaded."""
        self._check()
        with self._lock:
            self._check_stopped()
            if self._seat is not None:
                try:
                    self._seat.become(ACK)
                except OSError as exc:
                    raise self._gone() from exc
            self._over = True

    def stop(self, reason: str) -> None:
        """Tell the sender that this receiver is lost, unless it is done, and make a receive that still runs raise."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self._stopped = reason
            with suppress(OSError, ConfigError):  # the folder is gone, and the sender with it
                seat = self._seat or (Seat.take(self._folder, self._who) if self._folder.is_dir() else None)
                if seat is not None:
                    seat.become(FAIL, reason)

    def leave(self) -> None:
        """Give up the seat."""
        if self._seat is not None:
            self._seat.leave()

    def _await(self, path: Path) -> None:
        """Wait for a shard, as long as the sender lives and there is time."""
        poll(path.exists, self._check)

    def _check(self, *, often: bool = True) -> None:
        """Raise when this must end. Unless `often`, the folder is not looked at if it was a moment ago."""
        self._check_stopped()
        now = self._clock.now()
        if not often and now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        failed = self._folder / f"{FAIL}-{SENDER}"
        with suppress(FileNotFoundError):
            words = failed.read_text(encoding="utf-8", errors="replace")
            raise self._error(f"the sender failed after {self.tally.counts()}: {words}")
        if now - self._asked >= _PEER_EVERY_S:
            self._asked = now
            self._check_sender()
        if not self._deadline.remaining(self._clock):
            reason = f"nothing more came to {self._folder} within {self._deadline.limit_s:.3g} s"
            raise self._error(f"{reason}; have {self.tally.counts()}", self._sender)

    def _check_sender(self) -> None:
        """Raise when the sender is dead, or has gone."""
        try:
            alive = is_held(self._folder / f"{HERE}-{SENDER}")
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise self._gone() from None
            return  # it has just failed, and the next look says why
        if not alive:
            raise self._error(f"the sender's process is dead; have {self.tally.counts()}", self._sender)

    def _check_unseen(self) -> None:
        """Raise when the folder will not be seen."""
        self._check_stopped()
        if self._near:
            raise self._gone()
        if not self._deadline.remaining(self._clock):
            raise self._error(
                f"the folder {self._folder} was not seen here within {self._deadline.limit_s:.3g} s: set "
                f"{FOLDER_VARIABLE} in the trainer's environment to a folder that this machine sees, by the same path",
                self._sender,
            )

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._error(self._stopped)

    def _gone(self) -> WeightSyncError:
        return self._error(f"the folder {self._folder} is gone: the sender gave the session up", self._sender)

    def _error(self, reason: str, *missing: str) -> WeightSyncError:
        return self.tally.error(reason, missing)
