"""What both runtimes make of `RuntimeSettings`: options checked by name, run ids checked by form."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from verl_contracts.runtime import RuntimeSettings

__all__ = ["build_config"]

C = TypeVar("C")


def build_config(kind: type[C], settings: RuntimeSettings) -> C:
    """Build the runtime's `Config` from the options, naming an unknown one and its nearest match."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", settings.run_id):
        raise ConfigError(f"run_id {settings.run_id!r} may hold letters, digits, '-' and '_' only")
    if settings.owner_limit_s <= 0:
        raise ConfigError(f"owner_limit_s is {settings.owner_limit_s:g}; must be > 0")
    known = [entry.name for entry in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for name in settings.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"runtime option {name!r} is unknown{hint}")
    return kind(**settings.options)
