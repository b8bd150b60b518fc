"""From options, as they come out of a config file, to a plug-in's own typed `Config`; and what "unset" means.

Every problem of one section is in one error, under the full key: an option that is misspelt must never be ignored.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from verl_contracts.errors import ConfigError
from verl_contracts.plugins.finding import nearest

__all__ = ["build_config", "build_plugin", "check_options", "resolve_optional"]

C = TypeVar("C")


def resolve_optional(value: object, *, key: str = "value") -> str | None:
    """Return a name or class path, or None when it is unset: absent, null, ``{}`` and ``""`` all mean that.

    Raises `ConfigError` for anything that is not text.
    """
    if value is None or value == "" or (isinstance(value, Mapping) and not value):
        return None
    if not isinstance(value, str):
        raise ConfigError(f"{key}: must be a name or a class path, got {value!r} ({type(value).__name__})")
    return value


def build_config(config_class: type[C], options: Mapping[str, object], *, key: str) -> C:
    """Build a plug-in's `Config`, a frozen dataclass, from `options`.

    Numbers, text, booleans, literals, tuples, mappings and nested dataclasses are checked; whole numbers pass for
    float, and lists become tuples. A type that is imported for type checkers only is not checked. Raises `ConfigError`
    naming ``key.option`` for each unknown, missing or wrongly typed one.
    """
    problems: list[str] = []
    built = _build(config_class, options, key, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return cast("C", built)


def check_options(cls: type, options: Mapping[str, object], *, key: str, arguments: Sequence[str] = ()) -> None:
    """Check that ``cls(**arguments, **options)`` would bind, without calling it.

    `arguments` are the keywords that the family's contract states. Raises `ConfigError` naming ``key.option`` for
    options that the constructor does not take or lacks.
    """
    parameters = inspect.signature(cls).parameters.values()
    names = [
        p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in arguments
    ]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        _unknown(name, f"{cls.__qualname__} takes", names, key)
        for name in options
        if name in arguments or (name not in names and not open_ended)
    ]
    problems += [
        f"{key}.{p.name}: missing, and {cls.__qualname__} requires it"
        for p in parameters
        if p.name in names and p.default is p.empty and p.name not in options
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def build_plugin(
    cls: type[C], options: Mapping[str, object], *, key: str, arguments: Mapping[str, object] | None = None
) -> C:
    """Call ``cls(**arguments, **options)`` for a family that is constructed so.

    `arguments` are the keywords that the family's contract states. Raises `ConfigError` naming ``key.option`` for
    options that the constructor does not take or lacks. What the constructor itself raises passes through.
    """
    given = dict(arguments or {})
    check_options(cls, options, key=key, arguments=tuple(given))
    return cls(**given, **options)


def _unknown(name: str, takes: str, names: Sequence[str], key: str) -> str:
    return f"{key}.{name}: unknown option{nearest(name, names)}; {takes} {', '.join(names) or 'none'}"


def _build(config_class: type, options: object, key: str, problems: list[str]) -> object:
    if not isinstance(options, Mapping):
        problems.append(f"{key}: must be a mapping for {config_class.__qualname__}, got {options!r:.80}")
        return None
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
    before = len(problems)
    problems += [
        _unknown(str(name), f"{config_class.__qualname__} takes", list(fields), key)
        for name in options
        if name not in fields
    ]
    values: dict[str, object] = {}
    for name, field in fields.items():
        if name in options:
            values[name] = _convert(options[name], _hint(config_class, name), f"{key}.{name}", problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{key}.{name}: missing, and {config_class.__qualname__} requires it")
    if len(problems) > before:
        return None
    try:
        built: object = config_class(**values)
    except ValueError as exc:
        raise ConfigError(f"{key}: {exc}") from exc
    return built


def _hint(config_class: type, name: str) -> object:
    """Return the type of a field, or `object` when it cannot be resolved at run time."""
    owner = next(base for base in config_class.__mro__ if name in vars(base).get("__annotations__", {}))
    annotation = vars(owner)["__annotations__"][name]
    probe = type("probe", (), {"__annotations__": {name: annotation}, "__module__": owner.__module__})
    namespace = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    try:
        hint: object = get_type_hints(probe, globalns=dict(namespace), localns=dict(vars(owner)))[name]
    except (NameError, TypeError):  # imported for type checkers only: nothing to check here
        return object
    return hint


def _convert(value: object, hint: object, key: str, problems: list[str]) -> object:
    """Return `value` as `hint` wants it, or note a problem."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        for choice in arguments:
            tried: list[str] = []
            converted = _convert(value, choice, key, tried)
            if not tried:
                return converted
    elif origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin in (tuple, list, Sequence) and isinstance(value, (list, tuple)):
        repeated = origin is not tuple or (len(arguments) == 2 and arguments[1] is Ellipsis)
        if repeated or len(arguments) == len(value):
            kinds = [arguments[0]] * len(value) if repeated else list(arguments)
            items = [
                _convert(item, kind, f"{key}[{i}]", problems)
                for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
            ]
            return items if origin is list else tuple(items)
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {name: _convert(item, arguments[1], f"{key}.{name}", problems) for name, item in value.items()}
    elif isinstance(hint, type) and origin is None:
        if dataclasses.is_dataclass(hint) and not isinstance(value, hint):
            return _build(hint, value, key, problems)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, hint) and (hint is bool or hint is object or not isinstance(value, bool)):
            return value
    elif origin not in (tuple, list, Sequence, dict, Mapping):
        return value  # a type that has no simple check
    problems.append(f"{key}: must be {_show(hint)}, got {value!r:.80} ({type(value).__name__})")
    return value


def _show(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")
