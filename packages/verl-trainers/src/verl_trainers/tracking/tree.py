"""A configuration as plain values, whole for trackers that keep trees and flat for those that keep pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_contracts.events import JsonValue

__all__ = ["flat", "plain", "plain_fields"]


def plain(value: object) -> JsonValue:
    """Return `value` as JSON has it. What JSON lacks, such as a path, becomes text."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def plain_fields(data: object) -> dict[str, JsonValue]:
    """Return the fields of a dataclass, nested ones as mappings."""
    if not dataclasses.is_dataclass(data) or isinstance(data, type):
        raise TypeError(f"a dataclass is needed, got {type(data).__name__}")
    return {name: plain(value) for name, value in dataclasses.asdict(data).items()}


def flat(tree: Mapping[str, JsonValue], *, before: str = "") -> Iterator[tuple[str, str | int | float | bool | None]]:
    """Yield ``a.b.c`` and the value of each leaf; a list is one leaf, as text."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, before=f"{before}{name}.")
        elif value is None or isinstance(value, (str, int, float, bool)):
            yield before + name, value
        else:
            yield before + name, str(value)
