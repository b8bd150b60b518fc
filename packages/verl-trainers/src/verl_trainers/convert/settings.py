"""What the input says as a whole, for rows that read more than their own key, and what there is here.

Owns the rule that an absent key has upstream's default: a translation that reads two keys must not depend on whether
the second one was written down.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, get_origin

from verl_trainers.config.build import build_run_config, leaf_keys
from verl_trainers.config.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["ENGINES", "Settings", "is_legal", "misfit", "nested", "not_offered", "offered"]

ENGINES = "verl_rollout.engines"
"""Entry points of the inference engines, a family of the rollout package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All values of an input, and upstream's defaults."""

    values: Mapping[str, object]
    """Upstream key → value that holds in the end."""
    mode: str
    """Trainer mode that upstream would run in."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Upstream's defaults of keys that others are translated by."""

    def get(self, key: str) -> object:
        """Return the value of `key`: as set, else upstream's default, else None."""
        return self.values.get(key, self.defaults.get(key))

    def number(self, key: str, otherwise: int = 0) -> int:
        """Return the whole number at `key`; `otherwise` when there is none."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else otherwise

    def has(self, key: str) -> bool:
        """Return whether the input itself sets `key`."""
        return key in self.values

    @property
    def has_own_replicas(self) -> bool:
        """Whether replicas have devices of their own."""
        return self.mode in ("one_step_off", "fully_async", "separate_async")


@functools.cache
def offered(group: str, always: str) -> frozenset[str]:
    """Return the names of the plug-ins installed in `group`; `always`, our default, is one of them in any case."""
    return frozenset({always, *(entry.name for entry in entry_points(group=group))})


def not_offered(what: str, value: object, known: Collection[str]) -> str:
    """Say that no plug-in of the kind `what` is called `value`, and that those in `known` are."""
    return f"no {what} is called {str(value)!r}; installed: {', '.join(sorted(known))}"


def is_legal(key: str) -> bool:
    """Return whether our schema has `key`, or options that it may belong to."""
    leaves = leaf_keys()
    if key in leaves:
        return True
    while key := key.rpartition(".")[0]:
        if get_origin(leaves.get(key)) is Mapping:
            return True
    return False


def misfit(key: str, value: object) -> str:
    """Return why our key `key` cannot have `value`; empty when it can."""
    _, mistakes = build_run_config(Sources(tree=nested({key: value}), places={}))
    return mistakes[0].text if mistakes else ""


def nested(values: Mapping[str, object]) -> dict[str, object]:
    """Return `values`, with dotted keys, as a tree."""
    tree: dict[str, object] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        inner = tree
        for name in sections:
            deeper = inner.setdefault(name, {})
            inner = deeper if isinstance(deeper, dict) else {}
        inner[leaf] = value
    return tree
