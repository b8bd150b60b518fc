"""The function that makes a recipe's models and data, named by ``package.module:function``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["load_prepare"]


def load_prepare(path: str) -> Callable[[Path], None]:
    """Return the function. Raises `ConfigError` when there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"prepare: must be package.module:function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ConfigError(f"prepare: {module_name!r} cannot be imported: {exc}") from exc
    function: object = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"prepare: no function {name!r} in {module_name}")
    return cast("Callable[[Path], None]", function)
