"""The verdict on parameters must agree with Python itself: a call that binds to the contract binds to the class."""

from __future__ import annotations

import inspect
import itertools
from inspect import Parameter, Signature

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_contracts.plugins.signatures import parameter_problems, show_function, without_first

NAMES = ("a", "b", "c")
KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@st.composite
def signatures(draw: st.DrawFn, *, variadic: bool) -> Signature:
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, 3))]
    kinds = sorted(draw(st.sampled_from(KINDS)) for _ in names)
    parameters: list[Parameter] = []
    had_default = False
    for name, kind in zip(names, kinds, strict=True):
        has_default = draw(st.booleans()) or (had_default and kind is not Parameter.KEYWORD_ONLY)
        had_default = has_default
        parameters.append(Parameter(name, kind, default=0 if has_default else Parameter.empty))
    if variadic and draw(st.booleans()):
        place = sum(p.kind is not Parameter.KEYWORD_ONLY for p in parameters)
        parameters.insert(place, Parameter("args", Parameter.VAR_POSITIONAL))
    if variadic and draw(st.booleans()):
        parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD))
    return Signature(parameters)


def allowed_calls(signature: Signature) -> list[tuple[list[int], dict[str, int]]]:
    """Every way to call `signature`: each parameter by position or by name, defaults given or left out."""
    calls = []
    names = list(signature.parameters)
    for count in range(len(names) + 1):
        for size in range(len(names) + 1):
            for keywords in itertools.combinations(names, size):
                args, kwargs = [0] * count, dict.fromkeys(keywords, 0)
                if _binds(signature, args, kwargs):
                    calls.append((args, kwargs))
    return calls


def _binds(signature: Signature, args: list[int], kwargs: dict[str, int]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@settings(max_examples=500, deadline=None, database=None)
@given(has=signatures(variadic=True), wants=signatures(variadic=False))
def test_verdict_agrees_with_binding_for_every_call_that_the_contract_allows(has: Signature, wants: Signature) -> None:
    refused = [call for call in allowed_calls(wants) if not _binds(has, *call)]
    assert bool(parameter_problems(has, wants)) == bool(refused), f"{has} for {wants}: refused {refused}"


@pytest.mark.parametrize(
    ("has", "wants", "reason"),
    [
        ("(x)", "(x, /, *, deadline)", "lacks keyword 'deadline'"),
        ("(x, *, deadlin)", "(x, /, *, deadline)", "lacks keyword 'deadline'; nearest: 'deadlin'"),
        ("(x, deadline)", "(x, y, /, *, deadline)", "must be a keyword, not a positional parameter"),
        ("(x, *, limit)", "(x, /, *, limit=1)", "'limit' must have a default"),
        ("(*, x)", "(x, /)", "lacks positional parameter 'x'"),
        ("(x, *, token)", "(x, /)", "requires 'token', which nobody passes"),
        ("(y)", "(x)", "must be callable by the name 'x'"),
    ],
)
def test_reason_names_the_parameter(has: str, wants: str, reason: str) -> None:
    problems = parameter_problems(_signature(has), _signature(wants))
    assert any(reason in problem for problem in problems), problems


def _signature(text: str) -> Signature:
    namespace: dict[str, object] = {}
    exec(f"def f{text}: ...", namespace)
    function = namespace["f"]
    assert callable(function)
    return inspect.signature(function)


def test_definition_is_shown_as_it_was_written() -> None:
    async def run(self: object, x: int, /, *, name: str = "a b", last: list[int] | None = None) -> tuple[int, ...]:
        return ()

    signature = inspect.signature(run)
    assert show_function("run", run, signature) == (
        "async def run(self: object, x: int, /, *, name: str = 'a b', last: list[int] | None = None) -> tuple[int, ...]"
    )
    assert list(without_first(signature).parameters) == ["x", "name", "last"]
