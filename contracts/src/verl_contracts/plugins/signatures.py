"""Whether a method accepts every call that a contract allows, and how to show both.

Pure functions on `inspect` objects. `isinstance` with a runtime-checkable Protocol compares names only: it accepts a
wrong keyword, and sync for async, which then fail in the middle of a run.
"""

from __future__ import annotations

import inspect
import itertools
from inspect import Parameter, Signature
from typing import TYPE_CHECKING

from verl_contracts.plugins.finding import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["parameter_problems", "show_function", "without_first"]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class _Plain(str):
    """An annotation that is shown as it was written, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def without_first(signature: Signature) -> Signature:
    """Return `signature` without `self` or `cls`; unchanged when it swallows it in ``*args``."""
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind in _POSITIONAL:
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def parameter_problems(has: Signature, wants: Signature) -> list[str]:
    """Return why `has` refuses a call that `wants` allows; empty when it accepts them all. Neither has `self`.

    Python itself gives the verdict, call by call; the reasons are found afterwards.
    """
    refused = next((call for call in _calls(wants) if not _binds(has, *call)), None)
    if refused is None:
        return []
    positional, keywords = refused
    shown = ", ".join([*positional, *(f"{name}=..." for name in keywords)])
    return _reasons(has, wants) or [f"refuses the call ({shown})"]


def _calls(signature: Signature) -> Iterator[tuple[list[str], list[str]]]:
    """Yield every call that `signature` allows: what goes by position, and what by name."""
    parameters = list(signature.parameters.values())
    by_position = [p for p in parameters if p.kind in _POSITIONAL]
    for count in range(len(by_position) + 1):
        rest = [p for p in parameters if p not in by_position[:count]]
        ways: list[tuple[str | None, ...]] = []
        for parameter in rest:
            named = (parameter.name,) if parameter.kind in _KEYWORD else ()
            omitted = (None,) if parameter.default is not Parameter.empty else ()
            ways.append((*named, *omitted))
        for chosen in itertools.product(*ways):
            yield [p.name for p in by_position[:count]], [name for name in chosen if name is not None]


def _binds(signature: Signature, positional: list[str], keywords: list[str]) -> bool:
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError:  # which is the answer
        return False
    return True


def _reasons(has: Signature, wants: Signature) -> list[str]:
    theirs = list(has.parameters.values())
    positional = [p for p in theirs if p.kind in _POSITIONAL]
    keyword = {p.name: p for p in theirs if p.kind in _KEYWORD}
    any_positional = any(p.kind is Parameter.VAR_POSITIONAL for p in theirs)
    any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in theirs)
    by_position = [p for p in wants.parameters.values() if p.kind in _POSITIONAL]
    problems: list[str] = []
    filled: set[str] = set()
    for index, want in enumerate(by_position):
        if index < len(positional):
            got = positional[index]
            filled.add(got.name)
            if want.default is not Parameter.empty and got.default is Parameter.empty:
                problems.append(f"{got.name!r} must have a default")
            if want.kind is Parameter.POSITIONAL_OR_KEYWORD and keyword.get(want.name) is not got:
                problems.append(f"positional parameter {index + 1} must be callable by the name {want.name!r}")
        elif not any_positional:
            problems.append(f"lacks positional parameter {want.name!r}")
    for want in wants.parameters.values():
        if want.kind is not Parameter.KEYWORD_ONLY:
            continue
        named = keyword.get(want.name)
        if named is None:
            if not any_keyword:
                others = [name for name in keyword if name not in wants.parameters]
                problems.append(f"lacks keyword {want.name!r}{nearest(want.name, others)}")
            continue
        if named.name in filled:
            problems.append(f"{want.name!r} must be a keyword, not a positional parameter that is taken already")
        elif want.default is not Parameter.empty and named.default is Parameter.empty:
            problems.append(f"{want.name!r} must have a default")
        filled.add(want.name)
    for mine in theirs:
        if mine.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        if mine.name not in filled and mine.default is Parameter.empty:
            problems.append(f"requires {mine.name!r}, which nobody passes")
    return problems


def show_function(name: str, function: object, signature: Signature) -> str:
    """Return the ``def`` line of `function`, annotations as they were written."""
    shown = signature.replace(
        parameters=[p.replace(annotation=_plain(p.annotation)) for p in signature.parameters.values()],
        return_annotation=_plain(signature.return_annotation),
    )
    prefix = "async def" if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else "def"
    return f"{prefix} {name}{shown}"


def _plain(annotation: object) -> object:
    return _Plain(annotation) if isinstance(annotation, str) else annotation
