"""An event log in memory, for tests that check what happened and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.clock import SystemClock
from verl_contracts.events import Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink, JsonValue

__all__ = ["RecordingEvents"]


class RecordingEvents:
    """Keeps every event, in order."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self.events: list[Event] = []

    def emit(self, name: str, fields: Mapping[str, JsonValue], /) -> None:
        """Append the event."""
        self.events.append(Event(name=name, at=self._clock.now(), fields=dict(fields)))

    def named(self, name: str) -> list[Event]:
        """Return the events of one name, in order."""
        return [event for event in self.events if event.name == name]

    def names(self) -> list[str]:
        """Return the names of all events, in order."""
        return [event.name for event in self.events]


if TYPE_CHECKING:

    def _is_sink(x: RecordingEvents) -> EventSink:
        return x
