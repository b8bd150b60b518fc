"""What was found out before a run, as lines for people: mistakes first, each with its place, its key and its fix."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_trainers.config.mistakes import Mistake, config_error

if TYPE_CHECKING:
    from typing import TextIO

    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.preflight.data import InputFindings

__all__ = ["Report", "wants_color"]

_RED, _YELLOW, _GREEN, _BOLD, _END = "\033[31m", "\033[33m", "\033[32m", "\033[1m", "\033[0m"


def wants_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows colors and its user wants them (NO_COLOR is not set)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The findings about one configuration."""

    mistakes: tuple[Mistake, ...] = ()
    """What keeps it from running."""
    warnings: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    """What is true of it: steps, plan, plug-ins, data, devices, memory."""
    resolved: ResolvedConfig | None = None
    """None when there is a mistake."""
    inputs: InputFindings | None = None
    """The data that were read; None when the keys that name them are broken."""

    @property
    def exit_code(self) -> int:
        """0 when nothing is wrong, 2 otherwise."""
        return 2 if self.mistakes else 0

    def facts(self, *, color: bool = False) -> list[str]:
        """Return the lines for standard output."""
        end = [] if self.mistakes else [_paint("everything fits; nothing was started", _GREEN, color)]
        return [*self.lines, *end]

    def problems(self, *, color: bool = False) -> list[str]:
        """Return the lines for standard error: mistakes, then warnings, one line each."""
        seen = dict.fromkeys(
            ": ".join(part for part in (m.place, _paint(m.key, _BOLD, color) if m.key else "", m.text) if part)
            for m in self.mistakes
        )
        return [
            *(f"{_paint('error:', _RED, color)} {text}" for text in seen),
            *(f"{_paint('warning:', _YELLOW, color)} {text}" for text in self.warnings),
        ]

    def require(self) -> None:
        """Raise `ConfigError` with every mistake, if there is one."""
        if self.mistakes:
            raise config_error(self.mistakes)


def _paint(text: str, code: str, color: bool) -> str:
    return f"{code}{text}{_END}" if color else text
