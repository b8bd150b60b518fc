"""The event log: what happened when, in an order that tests and tools can check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Event", "EventSink", "JsonValue", "NullEvents"]

JsonValue: TypeAlias = Union[str, int, float, bool, "Sequence[JsonValue]", "Mapping[str, JsonValue]", None]
"""What can be written to JSON without a custom encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event as it was recorded."""

    name: str
    """Dotted name, for example ``"sync.end"``."""
    at: float
    """Monotonic seconds on the recorder's clock."""
    fields: Mapping[str, JsonValue]
    """Details; the keys belong to the event's name."""


class EventSink(Protocol):
    """Records events. One method; who may read them, and how, is the sink's business.

    Called from the event loop; must not block and must not raise.
    """

    def emit(self, name: str, fields: Mapping[str, JsonValue], /) -> None:
        """Record that `name` happened now."""
        ...


class NullEvents:
    """Forgets every event."""

    def emit(self, name: str, fields: Mapping[str, JsonValue], /) -> None:
        """Do nothing."""
