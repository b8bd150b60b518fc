"""Optional libraries, asked for when a tracker that needs one is built."""

from __future__ import annotations

import importlib

from verl_contracts.errors import ConfigError

__all__ = ["require"]


def require(module: str, *, extra: str) -> None:
    """Import `module`. Raises `ConfigError` with what keeps it from importing and the extra that brings it."""
    try:
        importlib.import_module(module)
    except ImportError as exc:
        missing = exc.name or module
        raise ConfigError(
            f"the tracker {extra!r} needs the module {missing!r}, which cannot be imported ({exc}); run: "
            f"pip install 'verl-trainers[{extra}]'"
        ) from exc
