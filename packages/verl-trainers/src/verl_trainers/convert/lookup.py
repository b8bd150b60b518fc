"""One key of upstream's: which row counts for it, and a sentence for those who wrote it where our keys stand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from verl_trainers.convert.rows import ITSELF, UNSUPPORTED
from verl_trainers.convert.settings import Settings
from verl_trainers.convert.tables import TABLE

if TYPE_CHECKING:
    from verl_trainers.convert.rows import Row

__all__ = ["find_row", "said_of"]


@functools.cache
def find_row(key: str) -> Row | None:
    """Return the row that counts for `key`; None when upstream has no such key."""
    exact = next((row for row in TABLE if row.key == key), None)
    return exact or next((row for row in TABLE if row.match(key)), None)


def said_of(key: str, value: object) -> str | None:
    """Say what there is here instead of upstream's `key`, which is `value`; None when upstream has no such key."""
    row = find_row(key)
    match = None if row is None else row.match(key)
    if row is None or match is None:
        return None
    rest = match.group(match.lastindex) if match.lastindex else ""
    targets = [target.replace("**", rest) for target in row.targets if target not in (ITSELF, key)]
    if targets:
        return f"verl's key, renamed: use {' or '.join(targets)} ({row.why})"
    fate = row.decide(value, Settings(values={key: value}, mode="sync"))
    near = fate.near if fate.kind == UNSUPPORTED else ""
    return f"verl's key, not supported here: {row.why}; {f'nearest: {near}' if near else 'leave it out'}"
