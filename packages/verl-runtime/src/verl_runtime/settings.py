"""What both runtimes make of `RuntimeSettings`: every value checked before anything is started."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.errors import ConfigError
from verl_contracts.plugins.config import build_config

if TYPE_CHECKING:
    from verl_contracts.runtime import RuntimeSettings

__all__ = ["read_settings"]

C = TypeVar("C")


def read_settings(settings: RuntimeSettings, config_class: type[C]) -> C:
    """Check `settings` and build the runtime's `Config` from its options. Raises `ConfigError`."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", settings.run_id):
        raise ConfigError(f"run_id {settings.run_id!r} may hold letters, digits, '-' and '_' only")
    if settings.owner_limit_s <= 0:
        raise ConfigError(f"owner_limit_s is {settings.owner_limit_s:g}; must be > 0")
    return build_config(config_class, settings.options, key="runtime.options")
