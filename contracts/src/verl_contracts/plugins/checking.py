"""Whether a class meets a Protocol: every member's presence, kind, async-ness and parameters, and the constructor.

Returns all problems at once, as sentences, so that one try is enough to see what is left to write.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from typing import TYPE_CHECKING

from typing_extensions import get_protocol_members, is_protocol

from verl_contracts.plugins.finding import nearest
from verl_contracts.plugins.signatures import parameter_problems, show_function, without_first

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["constructor_problems", "protocol_problems"]

_MISSING = object()


def protocol_problems(cls: type, protocol: type) -> list[str]:
    """Return what keeps `cls` from meeting `protocol`; empty when nothing does."""
    problems: list[str] = []
    for name in sorted(get_protocol_members(protocol)):
        contract = inspect.getattr_static(protocol, name, _MISSING)
        found = _lookup(cls, name)
        if contract is _MISSING:
            problems += _class_variable(cls, name, found)
        elif isinstance(contract, property):
            problems += _property(cls, name, found, contract)
        else:
            problems += _method(cls, name, found, contract)
    if inspect.isabstract(cls):
        abstract = [name for name in dir(cls) if getattr(getattr(cls, name), "__isabstractmethod__", False)]
        problems.append(f"is abstract: {', '.join(abstract)} not written")
    return problems


def constructor_problems(cls: type, arguments: Sequence[str]) -> list[str]:
    """Return why ``cls(**arguments, **options)`` cannot work, whatever the options; empty when it can."""
    try:
        signature = inspect.signature(cls)
    except ValueError:
        return []
    shown = show_function("__init__", None, signature)
    names = [p.name for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    problems = [
        f"constructor: lacks keyword {argument!r}{nearest(argument, names)}; has `{shown}`"
        for argument in arguments
        if argument not in names and not open_ended
    ]
    problems += [
        f"constructor: {p.name!r} is positional-only, but everything is passed by keyword; has `{shown}`"
        for p in signature.parameters.values()
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty
    ]
    return problems


def _lookup(cls: type, name: str) -> object:
    """Return what `cls` itself or a real base defines; what a Protocol base left empty does not count."""
    for base in cls.__mro__:
        if name in vars(base) and not is_protocol(base) and base is not object:
            found: object = vars(base)[name]
            return found
    return _MISSING


def _class_variable(cls: type, name: str, found: object) -> list[str]:
    if found is _MISSING:
        return [f"{name}: missing; the contract wants a class attribute{_near(cls, name)}"]
    if name != "Config":
        return []
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        return [f"Config: is {found!r:.80}; the contract wants a frozen dataclass"]
    if not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return [f"Config: {found.__qualname__} is a dataclass that is not frozen"]
    return []


def _property(cls: type, name: str, found: object, contract: property) -> list[str]:
    wanted = f"the contract wants a property `{name}{_returns(contract.fget)}`"
    if found is _MISSING:
        if _set_by_instances(cls, name):
            return []
        return [f"{name}: missing; {wanted}{_near(cls, name)}"]
    if isinstance(found, (types.FunctionType, classmethod, staticmethod)):
        return [f"{name}: is a method; {wanted}"]
    return []


def _set_by_instances(cls: type, name: str) -> bool:
    """Whether `name` is declared on the class or assigned in a constructor, as type checkers accept too."""
    for base in cls.__mro__:
        if is_protocol(base):
            continue
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if name in vars(base).get("__annotations__", {}) or (code is not None and name in code.co_names):
            return True
    return False


def _method(cls: type, name: str, found: object, contract: object) -> list[str]:
    wanted_function = contract.__func__ if isinstance(contract, (classmethod, staticmethod)) else contract
    if not isinstance(wanted_function, types.FunctionType):
        return []
    wants = inspect.signature(wanted_function)
    head = "@classmethod " if isinstance(contract, classmethod) else ""
    wanted = f"the contract wants `{head}{show_function(name, wanted_function, wants)}`"
    if found is _MISSING:
        return [f"{name}: missing; {wanted}{_near(cls, name)}"]
    if isinstance(found, (property, functools.cached_property)):
        return [f"{name}: is a property; {wanted}"]
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    if not callable(function):
        return [f"{name}: is {function!r:.80}, which cannot be called; {wanted}"]
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return []
    reasons: list[str] = []
    if isinstance(contract, classmethod) and not isinstance(found, (classmethod, staticmethod)):
        reasons.append("must be a classmethod")
    reasons += _async_problems(function, wanted_function, signature, wants)
    bound = isinstance(found, (types.FunctionType, classmethod))
    reasons += parameter_problems(without_first(signature) if bound else signature, without_first(wants))
    if not reasons:
        return []
    return [f"{name}: {'; '.join(reasons)}. It has `{show_function(name, function, signature)}`; {wanted}"]


def _async_problems(
    function: Callable[..., object],
    contract: Callable[..., object],
    has: inspect.Signature,
    wants: inspect.Signature,
) -> list[str]:
    returns = str(wants.return_annotation)
    coroutine = inspect.iscoroutinefunction(function)
    if inspect.iscoroutinefunction(contract):
        if inspect.isasyncgenfunction(function):
            return ["is an async generator, but must be a coroutine (`async def` without `yield`)"]
        declared = any(word in str(has.return_annotation) for word in ("Awaitable", "Coroutine", "Future", "Task"))
        return [] if coroutine or declared else ["is sync, but must be `async def`"]
    if coroutine:
        stream = "AsyncIterator" in returns
        return ["must yield: `async def` without `yield` is no stream" if stream else "is async, but must be sync"]
    if inspect.isasyncgenfunction(function) and "Async" not in returns:
        return ["is an async generator, but must be sync"]
    if inspect.isgeneratorfunction(function) and "Iter" not in returns:
        return ["is a generator, but must return its value"]
    return []


def _returns(function: Callable[..., object] | None) -> str:
    returns = getattr(function, "__annotations__", {}).get("return")
    return f" -> {returns}" if returns else ""


def _near(cls: type, name: str) -> str:
    if name in dir(cls) and name not in dir(object):
        return "; the class inherits the contract's own empty body"
    return nearest(name, (member for member in dir(cls) if not member.startswith("_")))
