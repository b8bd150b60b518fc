"""Rows of text as a table whose last column wraps to the terminal."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["table"]

_GAP = "  "
_NARROWEST = 40


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None) -> list[str]:
    """Return lines; all columns but the last are as wide as their widest cell. `width` of None is the terminal's."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head) - 1)]
    left = sum(widths) + len(_GAP) * len(widths)
    room = max((width or shutil.get_terminal_size((120, 24)).columns) - left, _NARROWEST)
    lines = []
    for row in (head, *rows):
        start = _GAP.join([*(cell.ljust(size) for cell, size in zip(row, widths, strict=False)), ""])
        wrapped = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{start}{wrapped[0]}".rstrip(), *(" " * left + part for part in wrapped[1:])]
    return lines
