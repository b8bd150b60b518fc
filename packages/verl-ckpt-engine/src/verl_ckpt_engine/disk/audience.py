"""The receivers that one send still listens to, as their seats tell.

Owns who is left. A receiver that failed or died is dropped, so that one broken replica does not keep the others from
their weights; only when nobody is left does the send fail. One that is slow is waited for until half of the time is
over that was left when everything was written, if another one is done.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from verl_ckpt_engine.disk.seats import ACK, FAIL, HERE, is_held, poll, receiver_seat
from verl_ckpt_engine.shm.waiting import ProcessId, process_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.errors import WeightSyncError
    from verl_contracts.weights import EndpointInfo, Plan

__all__ = ["Audience"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.02
"""How often the folder is looked at while there is other work."""
_PEERS_EVERY_S: Final = 0.1
"""How often it is asked who lives."""
_PATIENCE: Final = 0.5


class Audience:
    """Knows the receivers of one plan, and does without those that are lost."""

    def __init__(
        self, folder: Path, plan: Plan, clock: Clock, *, error: Callable[[str, Sequence[str]], WeightSyncError]
    ) -> None:
        """`error` makes an error of a reason and of who is missing."""
        self._folder = folder
        self._clock = clock
        self._error = error
        self._scope = process_scope()
        self._waiting = {receiver_seat(endpoint.owner, endpoint.rank): endpoint for endpoint in plan.receivers}
        self._done: set[str] = set()
        self._causes: dict[str, str] = {}
        self._looked = self._asked = clock.now()

    @property
    def missing(self) -> list[str]:
        """Names of those who have neither finished nor failed."""
        return [_name(endpoint) for endpoint in self._waiting.values()]

    def glance(self) -> None:
        """Look who failed, if that was not done a moment ago. Raises `WeightSyncError` when nobody is left."""
        if self._clock.now() - self._looked >= _LOOK_EVERY_S:
            self._look()

    def wait_for_all(self, deadline: Deadline, check: Callable[[Sequence[str]], None]) -> None:
        """Return once everybody who is left has loaded everything; `check` gets the names of those who have not."""
        patient_until = self._clock.now() + deadline.remaining(self._clock) * _PATIENCE

        def ready() -> bool:
            self._look()
            if self._done and self._clock.now() > patient_until:
                for seat in list(self._waiting):
                    self._lose(seat, "it is not done, and another one is")
            return not self._waiting

        poll(ready, lambda: check(self.missing))

    def _look(self) -> None:
        now = self._looked = self._clock.now()
        states = self._states()
        for seat in [seat for seat in self._waiting if states.get(seat) == ACK]:
            del self._waiting[seat]
            self._done.add(seat)
        for seat in [seat for seat in self._waiting if states.get(seat) == FAIL]:
            self._lose(seat, (self._folder / f"{FAIL}-{seat}").read_text(encoding="utf-8", errors="replace"))
        if now - self._asked >= _PEERS_EVERY_S:
            self._asked = now
            for seat, endpoint in list(self._waiting.items()):
                if self._dead(seat, endpoint, joined=seat in states):
                    self._lose(seat, "its process is dead")

    def _states(self) -> dict[str, str]:
        """Return seat → state of all that are there. Raises `WeightSyncError` when the folder is gone."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError as exc:
            raise self._error(f"the folder {self._folder} cannot be read any more: {exc.strerror}", ()) from exc
        return {seat: state for state, dash, seat in (name.partition("-") for name in names) if dash}

    def _dead(self, seat: str, endpoint: EndpointInfo, *, joined: bool) -> bool:
        """Return whether a receiver died before it said how it ended; of one elsewhere only its seat can tell."""
        if not joined:
            address = endpoint.address
            return address["scope"] == self._scope and not ProcessId.parse(address["process"]).alive()
        try:
            return not is_held(self._folder / f"{HERE}-{seat}")
        except FileNotFoundError:
            return False  # it has just said how it ended

    def _lose(self, seat: str, cause: str) -> None:
        name = _name(self._waiting.pop(seat))
        self._causes[name] = cause
        _log.warning("the weights are sent without %s: %s", name, cause)
        if not self._waiting and not self._done:
            first, why = next(iter(self._causes.items()))
            raise self._error(f"no receiver is left; first {first}: {why}", list(self._causes))


def _name(endpoint: EndpointInfo) -> str:
    return f"{endpoint.owner} rank {endpoint.rank}"
