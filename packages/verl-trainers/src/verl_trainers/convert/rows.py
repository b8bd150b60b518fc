"""What the tables are made of: one row for each upstream key, or for each family of them.

A row says what becomes of a key in words, for people, and as a function, for the converter; both come from the same
arguments, so that the printed table cannot say something else than what is done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from verl_trainers.convert.settings import Settings

__all__ = [
    "COST",
    "DEFAULT",
    "ITSELF",
    "MAPPED",
    "RECORD",
    "RESULT",
    "SAME",
    "UNKNOWN",
    "UNSUPPORTED",
    "Decide",
    "Fate",
    "Row",
    "When",
    "computed",
    "fixed",
    "keep",
    "mapped",
    "moved",
    "refuse",
    "same",
    "under",
]

SAME, MAPPED, DEFAULT = "same", "mapped", "satisfied by default"
UNSUPPORTED, UNKNOWN = "not supported", "unknown"
"""What can become of a key."""

RESULT = "changes what is trained"
COST = "speed and memory only"
RECORD = "records and starting only"
"""What is lost with a key that is not supported."""

ITSELF = "(itself)"
"""Target of a key that has the same name here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of one key."""

    kind: str
    """One of `SAME`, `MAPPED`, `DEFAULT`, `UNSUPPORTED` and `UNKNOWN`."""
    why: str = ""
    near: str = ""
    """For what is not supported: the nearest thing there is; empty when there is none."""
    loses: str = RESULT
    values: Mapping[str, object] = field(default_factory=dict)
    """Our keys that it sets; for what is not supported, those that come nearest."""


def keep(why: str) -> Fate:
    """Return the fate of a key that asks for what is done anyway."""
    return Fate(kind=DEFAULT, why=why)


def mapped(values: Mapping[str, object], why: str) -> Fate:
    """Return the fate of a key that has another name or value here."""
    return Fate(kind=MAPPED, why=why, values=values)


def refuse(why: str, *, near: str = "", loses: str = RESULT, values: Mapping[str, object] | None = None) -> Fate:
    """Return the fate of a key that asks for what does not exist here."""
    return Fate(kind=UNSUPPORTED, why=why, near=near, loses=loses, values=values or {})


@dataclass(frozen=True, slots=True)
class When:
    """A switch: the row's key has an effect only while `key` has one of `values`."""

    key: str
    values: tuple[object, ...] = ()
    """Empty means any value that is neither null, false, 0, -1 nor empty."""

    def holds(self, settings: Settings) -> bool:
        """Return whether the switch is on in `settings`."""
        value = settings.get(self.key)
        return value in self.values if self.values else bool(value) and value != -1

    def __str__(self) -> str:
        return f"{self.key} is {' or '.join(map(str, self.values))}" if self.values else f"{self.key} is on"


Decide: TypeAlias = "Callable[[object, Settings], Fate]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One upstream key, or a pattern: ``*`` stands for one part of a key, ``**`` for one or more."""

    key: str
    becomes: str
    """What becomes of it, in a few words."""
    why: str
    decide: Decide
    yields: bool = False
    """Whether the row gives way to a key of ours at the same path."""
    targets: tuple[str, ...] = ()
    """Our keys that it may set; ``**`` in one stands for what it stood for in the key."""
    default: object = None
    """Upstream's default, where it must be written out because ours is another; None where it need not be."""

    def match(self, key: str) -> re.Match[str] | None:
        """Return how `key` belongs to this row, ``**`` being its last group; None when it does not."""
        escaped = re.escape(self.key).replace(r"\*\*", "(.+)").replace(r"\*", "([^.]+)")
        return re.fullmatch(escaped, key)


def same(key: str, values: Mapping[str, object] | None = None, *, why: str = "", default: object = None) -> Row:
    """Return the row of a key that is ours too; `values` translates those that are called differently here."""
    names = values or {}

    def decide(value: object, settings: Settings) -> Fate:
        new = _translated(value, names)
        if new is value:
            return Fate(kind=SAME, values={ITSELF: value})
        return mapped({ITSELF: new}, why or f"{show(value)} is called {show(new)} here")

    changes = ", ".join(f"{show(old)} → {show(new)}" for old, new in names.items())
    becomes = f"same; {changes}" if changes else "same"
    return Row(key=key, becomes=becomes, why=why, decide=decide, targets=(ITSELF,), default=default)


def moved(key: str, to: str, values: Mapping[str, object] | None = None, *, why: str, default: object = None) -> Row:
    """Return the row of a key that has another name here; null says nothing."""
    names = values or {}

    def decide(value: object, settings: Settings) -> Fate:
        return keep("not set") if value is None else mapped({to: _translated(value, names)}, why)

    return Row(key=key, becomes=f"→ {to}", why=why, decide=decide, targets=(to,), default=default)


def fixed(
    key: str,
    why: str,
    *,
    ok: tuple[object, ...] = (),
    any_value: bool = False,
    when: When | None = None,
    near: str = "",
    loses: str = RESULT,
    default: object = None,
) -> Row:
    """Return the row of a key that cannot be chosen here.

    Args:
        key: Upstream key.
        why: How it is here, whatever the key says.
        ok: Values that ask for just that; null and empty always do, and false unless true is among them.
        any_value: Whether every value does.
        when: Switch without which the key has no effect.
        near: The nearest thing there is here.
        loses: What is lost with another value.
        default: Upstream's default, where it asks for something that is not done here.
    """

    def decide(value: object, settings: Settings) -> Fate:
        is_off = value in (None, "", [], {}) or (value is False and True not in ok)
        if any_value or is_off or _among(value, ok):
            return keep(why)
        if when is not None and not when.holds(settings):
            return keep(f"no effect unless {when}")
        return refuse(why, near=near, loses=loses)

    fine = ", ".join(show(value) for value in ok)
    becomes = "satisfied by default"
    if not any_value:
        becomes = f"satisfied when {fine}, else not supported" if fine else "not supported unless off"
        becomes += f" ({loses})"
        becomes += f", and matters only when {when}" if when else ""
        becomes += f"; nearest: {near}" if near else ""
    return Row(key=key, becomes=becomes, why=why, decide=decide, yields=True, default=default)


def computed(key: str, decide: Decide, *targets: str, why: str, default: object = None) -> Row:
    """Return the row of a key whose translation reads other keys too, or has more than one outcome."""
    names = ", ".join("same" if target == ITSELF else target for target in targets)
    return Row(
        key=key, becomes=f"→ {names}" if names else "checked", why=why, decide=decide, targets=targets, default=default
    )


def under(prefix: str, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return `rows` with `prefix` before their keys."""
    return tuple(replace(row, key=f"{prefix}.{row.key}") for row in rows)


def show(value: object) -> str:
    """Return `value` as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if value == "" else str(value)


def _translated(value: object, names: Mapping[str, object]) -> object:
    return names.get(value, value) if isinstance(value, str) else value


def _among(value: object, others: tuple[object, ...]) -> bool:
    """Compare without taking 1 for true; whole numbers equal the floats of the same value."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in others)
