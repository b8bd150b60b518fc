"""The readers that one send still listens to.

Owns who is left. A reader that failed, died or stalls is dropped, so that one broken replica does not keep the others
from their weights; only when nobody is left does the send fail.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.page import READER_DONE, READER_FAILED, ReaderPage
from verl_ckpt_engine.shm.waiting import ProcessId, poll

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_ckpt_engine.shm.ring import Ring
    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.errors import WeightSyncError
    from verl_contracts.weights import EndpointInfo, Plan

__all__ = ["Audience"]

_log = logging.getLogger(__name__)

_PATIENCE = 0.5
"""Share of the time limit after which a reader that does not move is dropped, if another one does."""


class _Reader:
    """One reader, as the sender knows it."""

    def __init__(self, index: int, endpoint: EndpointInfo) -> None:
        self.index = index
        self.name = f"{endpoint.owner} rank {endpoint.rank}"
        self.process = ProcessId.parse(endpoint.address["process"])
        self.session = int(endpoint.address["session"])
        self.page = ReaderPage.open(endpoint.address)

    @property
    def done(self) -> bool:
        return self.page.state == READER_DONE

    def failure(self) -> str | None:
        """Return why it is lost, as far as its page tells."""
        if self.page.session != self.session:
            return "it went on to another sync"
        return self.page.message if self.page.state == READER_FAILED else None


class Audience:
    """Waits for the readers of one plan, and does without those that are lost."""

    def __init__(
        self,
        ring: Ring,
        plan: Plan,
        clock: Clock,
        deadline: Deadline,
        *,
        check: Callable[[Sequence[str]], None],
        error: Callable[[str, Sequence[str]], WeightSyncError],
    ) -> None:
        """`check` gets the names of those whom we wait for, often, and ends the wait by raising.

        `error` makes an error of a reason and of who is missing.
        """
        self._ring = ring
        self._plan = plan
        self._clock = clock
        self._check = check
        self._error = error
        self._patience_s = deadline.remaining(clock) * _PATIENCE
        self._live: dict[int, _Reader] = {}
        self._causes: dict[str, str] = {}

    def find(self) -> None:
        """Map the page of each reader. Raises `WeightSyncError` when there is none."""
        for index, endpoint in enumerate(self._plan.receivers):
            try:
                self._live[index] = _Reader(index, endpoint)
            except OSError as exc:
                name, process = f"{endpoint.owner} rank {endpoint.rank}", ProcessId.parse(endpoint.address["process"])
                cause = f"it gave up, or is out of reach for this process: {exc}" if process.alive() else _dead(process)
                self._lose(index, name, cause)
        self._need_one()

    def wait_for_cursor(self, cursor: int) -> None:
        """Wait until everybody is done with the frames before `cursor`."""
        if cursor > 0:
            self._wait(lambda reader: reader.page.cursor >= cursor)

    def wait_for_all(self) -> None:
        """Wait until everybody has loaded everything."""
        self._wait(lambda reader: reader.done)

    def _wait(self, reached: Callable[[_Reader], bool]) -> None:
        begun = self._clock.now()

        def ready() -> bool:
            return all(reached(reader) for reader in self._live.values())

        def holders() -> list[_Reader]:
            return [reader for reader in self._live.values() if not reached(reader)]

        def check() -> None:
            self._check([reader.name for reader in holders()])
            self._drop_failed()

        def check_peers() -> None:
            for reader in list(self._live.values()):
                if not reader.process.alive():
                    self._drop(reader, _dead(reader.process))
            stalled = holders()
            if len(stalled) < len(self._live) and self._clock.now() - begun > self._patience_s:
                for reader in stalled:
                    self._drop(reader, f"it did not move for {self._patience_s:.3g} s")

        self._drop_failed()
        poll(ready, check, check_peers)
        self._drop_failed()

    def _drop_failed(self) -> None:
        for reader in list(self._live.values()):
            failure = reader.failure()
            if failure is not None:
                self._drop(reader, failure)

    def _drop(self, reader: _Reader, cause: str) -> None:
        del self._live[reader.index]
        self._lose(reader.index, reader.name, cause)
        self._need_one()

    def _lose(self, index: int, name: str, cause: str) -> None:
        self._ring.drop(index)
        self._causes[name] = cause
        _log.warning("the weight stream goes on without %s: %s", name, cause)

    def _need_one(self) -> None:
        if not self._live:
            first, cause = next(iter(self._causes.items()))
            raise self._error(f"no receiver is left; first {first}: {cause}", list(self._causes))


def _dead(process: ProcessId) -> str:
    return f"process {process.pid} is dead"
