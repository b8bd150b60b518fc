"""Writing a configuration down, so that it can be read, compared, and run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from verl_trainers.config.schema import RunConfig

__all__ = ["dump_config", "plain_value"]


def dump_config(config: RunConfig, *, derived: Mapping[str, object] | None = None) -> str:
    """Return `config` as YAML that `load_config` reads back to an equal one.

    `derived` is what the run worked out by itself, for example the number of steps; it is written as comments.
    """
    head = "".join(f"# derived: {name} = {value}\n" for name, value in (derived or {}).items())
    return head + OmegaConf.to_yaml(OmegaConf.create(_sections(dataclasses.asdict(config))))


def _sections(tree: Mapping[str, object]) -> dict[str, object]:
    return {key: plain_value(item) for key, item in tree.items()}


def plain_value(value: object) -> object:
    """Return `value` as plain dicts and lists, with text that looks like a reference escaped."""
    if isinstance(value, Mapping):
        return _sections(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
