"""From a plain tree to the schema's dataclasses. Every mistake is noted; nothing stops at the first.

What "nothing" means is decided here, once: an absent, null or empty section is its default; null for a leaf is an error
unless the leaf's type says None; ``""`` and ``{}`` are "unset" for names and class paths, and errors elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Union, cast, get_args, get_origin, get_type_hints

from verl_contracts.rollout import PauseMode
from verl_contracts.training import LossAggregation
from verl_trainers.config.mistakes import Mistake, nearest
from verl_trainers.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_trainers.config.sources import Sources

__all__ = ["NAME_KEYS", "build_run_config", "leaf_keys", "section_keys"]

NAME_KEYS = frozenset(
    {
        "runtime",
        "prepare",
        "trainer.mode",
        "algorithm.adv_estimator",
        "reward.name",
        "reward.custom_reward_function.name",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.llm_server_manager_class",
        "actor_rollout_ref.rollout.checkpoint_manager_class",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
        "actor_rollout_ref.rollout.checkpoint_engine.backend",
    }
)
"""Leaves that hold a name or a class path, so that ``""`` and ``{}`` mean unset."""

_HINT_NAMES = {"Mapping": Mapping, "PauseMode": PauseMode, "LossAggregation": LossAggregation}
"""What the schema imports for type checkers only."""


ALIKE = 0.7
"""How much of two names must agree for one to be taken for the other."""


class _Unset:
    """A leaf that keeps its default."""


_UNSET = _Unset()


@functools.cache
def _hints(cls: type) -> Mapping[str, object]:
    return get_type_hints(cls, localns=_HINT_NAMES)


def _sections(cls: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield full key → type of everything in the schema, sections included."""
    for name, hint in _hints(cls).items():
        yield f"{prefix}{name}", hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _sections(hint, f"{prefix}{name}.")


def leaf_keys() -> Mapping[str, object]:
    """Return full key → type of every leaf of the schema."""
    return {key: hint for key, hint in _sections(RunConfig) if not dataclasses.is_dataclass(hint)}


def section_keys() -> tuple[str, ...]:
    """Return the full key of every section of the schema."""
    return tuple(key for key, hint in _sections(RunConfig) if dataclasses.is_dataclass(hint))


def build_run_config(sources: Sources) -> tuple[RunConfig, list[Mistake]]:
    """Build the config. A leaf with a mistake holds its default in the result."""
    builder = _Builder(sources)
    config = builder.section(RunConfig, sources.tree, "")
    return cast("RunConfig", config), [*sources.mistakes, *builder.mistakes]


class _Builder:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.mistakes: list[Mistake] = []

    def section(self, cls: type, tree: object, prefix: str) -> object:
        """Build one section; `prefix` is its key with a dot, or empty at the root."""
        if tree is None:
            tree = {}
        if not isinstance(tree, Mapping):
            self._note(prefix.rstrip("."), f"must be a section (key: value lines), got {tree!r}")
            tree = {}
        hints = _hints(cls)
        values: dict[str, object] = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if name not in hints:
                self._unknown(key, value, prefix, hints)
            elif key not in self._sources.broken:
                built = self._value(value, hints[name], key)
                if not isinstance(built, _Unset):
                    values[name] = built
        return cls(**values)

    def _value(self, value: object, hint: object, key: str) -> object:
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self.section(hint, value, f"{key}.")
        if key in NAME_KEYS and value in ("", {}):
            return _UNSET
        if get_origin(hint) is Mapping and value is None:
            return _UNSET
        if value is None and not _optional(hint):
            self._note(key, "null is not a value here; leave the key out for its default")
            return _UNSET
        try:
            return _convert(value, hint)
        except ValueError as exc:
            self._note(key, str(exc))
            return _UNSET

    def _unknown(self, key: str, value: object, prefix: str, hints: Mapping[str, object]) -> None:
        """Note an unknown key, or section: each of verl's keys in it for itself."""
        from verl_trainers.convert.lookup import said_of  # only a mistake needs these tables

        said = {leaf: said_of(leaf, each) for leaf, each in _leaves(key, value)}
        if not any(said.values()):
            said = {key: None}
        for leaf, text in said.items():
            self._note(leaf, text or f"unknown key; {_advice(leaf, prefix, hints)}")

    def _note(self, key: str, text: str) -> None:
        self.mistakes.append(Mistake(key=key, place=self._sources.place(key), text=text))


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield full key → value of everything in `value` that is no section."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value


def _advice(key: str, prefix: str, hints: Mapping[str, object]) -> str:
    """Return the key that was probably meant by `key`, whose section has `hints`, or those that are known there.

    Only names are compared: sections that are the same make any two keys look alike.
    """
    name = key.rpartition(".")[2]
    near = nearest(key.removeprefix(prefix), hints, cutoff=ALIKE)
    if near is not None:
        return f"did you mean {prefix}{near}?"
    elsewhere = {leaf.rpartition(".")[2]: leaf for leaf, _ in reversed(list(_sections(RunConfig)))}
    other = nearest(name, elsewhere, cutoff=ALIKE)
    return f"did you mean {elsewhere[other]}?" if other is not None else f"known here: {', '.join(sorted(hints))}"


def _optional(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _convert(value: object, hint: object) -> object:
    """Return `value` as `hint` wants it. Raises ValueError saying what was expected."""
    if _optional(hint):
        if value is None:
            return None
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    origin = get_origin(hint)
    if origin is Literal:
        return _literal(value, get_args(hint))
    if origin is tuple:
        return _tuple(value, get_args(hint))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be options (key: value lines), got {value!r}")
        return {str(name): item for name, item in value.items()}
    return _scalar(value, hint)


def _scalar(value: object, hint: object) -> object:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        raise ValueError(f"must be a finite number, got {value!r}")
    if hint is str and isinstance(value, str):
        if value:
            return value
        raise ValueError("must not be empty; leave the key out for its default")
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    name = wanted[hint] if isinstance(hint, type) and hint in wanted else str(hint)
    quote = " (write it in quotes)" if hint is str and isinstance(value, (int, float)) else ""
    raise ValueError(f"must be {name}, got {value!r}{quote}")


def _literal(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    near = nearest(value, [str(choice) for choice in choices]) if isinstance(value, str) else None
    advice = f"; did you mean {near!r}?" if near else ""
    raise ValueError(f"must be one of {', '.join(repr(choice) for choice in choices)}, got {value!r}{advice}")


def _tuple(value: object, kinds: tuple[object, ...]) -> tuple[object, ...]:
    if isinstance(value, str) and kinds[0] is str:
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list, got {value!r}")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"must be a list of {len(kinds)}, got {len(value)}: {value!r}")
    return tuple(_convert(item, kind) for item, kind in zip(value, kinds, strict=True))
