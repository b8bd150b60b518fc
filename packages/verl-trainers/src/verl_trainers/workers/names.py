"""One canonical name for each parameter: the one in the Hugging Face checkpoint, whatever wraps the module.

Wrappers (FSDP, `torch.compile`, DDP, activation checkpointing, PEFT) each put a component into every name, and nest. A
name that went out with a prefix would load nowhere, silently; two that become one would overwrite each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["canonical_name", "canonical_names"]

_ANYWHERE = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"})
"""Components that wrappers insert at any depth."""

_LEADING = (("module",), ("base_model", "model"))
"""Components that wrappers of a whole model put in front."""


def canonical_name(name: str) -> str:
    """Return `name` without what wrappers put into it. Idempotent."""
    parts = [part for part in name.split(".") if part not in _ANYWHERE]
    while (
        prefix := next((p for p in _LEADING if tuple(parts[: len(p)]) == p and len(parts) > len(p)), None)
    ) is not None:
        parts = parts[len(prefix) :]
    return ".".join(parts)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Return name → canonical name, in order. Raises `StateError` listing names that would become one, or nothing."""
    found = {name: canonical_name(name) for name in names}
    owners: dict[str, list[str]] = {}
    for name, canonical in found.items():
        owners.setdefault(canonical, []).append(name)
    clashes = {canonical: rows for canonical, rows in owners.items() if len(rows) > 1 or not canonical}
    if clashes:
        listed = "; ".join(f"{', '.join(rows)} → {canonical or 'nothing'}" for canonical, rows in clashes.items())
        raise StateError(f"parameters must have canonical names of their own, and these do not: {listed}")
    return found
