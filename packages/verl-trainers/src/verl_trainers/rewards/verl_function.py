"""A reward function in verl's form, ``compute_score(data_source, solution_str, ground_truth, extra_info)``, unchanged.

It may be `async`, and returns a number, a tuple that begins with one, or a dict with ``"score"`` and further numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, cast

from verl_contracts.errors import ConfigError
from verl_contracts.rewards import RewardResult
from verl_contracts.samples import SCORED

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from verl_contracts.rewards import RewardFunction, RewardRequest

__all__ = ["VerlFunction"]

_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


class VerlFunction:
    """Calls a function from a Python file, with keywords as verl does."""

    def __init__(self, *, path: str, name: str = "compute_score", **reward_kwargs: object) -> None:
        """Load function `name` from the file `path`; `reward_kwargs` are passed on with each call.

        Raises `ConfigError` when there is no such file or function, or it does not take what it will be called with;
        whatever the file itself raises passes through.
        """
        self._function = _load(path, name)
        _check_signature(self._function, reward_kwargs, f"{name} in {path}")
        self._kwargs = reward_kwargs

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        """Judge one answer. Raises what the function raises, and TypeError for a result in no known form."""
        result = self._function(
            data_source=request.data_source,
            solution_str=response,
            ground_truth=request.ground_truth,
            extra_info=dict(request.extra_info),
            **self._kwargs,
        )
        if inspect.iscoroutine(result):
            result = asyncio.run(cast("Coroutine[object, object, object]", result))
        return _read(result)


def _load(path: str, name: str) -> Callable[..., object]:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"reward.custom_reward_function.path: no such file: {path}")
    module_name = f"verl_reward_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.custom_reward_function.path: not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up while it runs
    spec.loader.exec_module(module)
    function: object = getattr(module, name, None)
    if not callable(function):
        defined = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ConfigError(
            f"reward.custom_reward_function.name: no function {name!r} in {path}; functions there: {defined}"
        )
    return cast("Callable[..., object]", function)


def _check_signature(function: Callable[..., object], options: Mapping[str, object], what: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not tell
        return
    given = [*_KEYWORDS, *options]
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as exc:
        raise ConfigError(
            f"reward.custom_reward_function.name: {what} takes {signature}, and is called with the keywords "
            f"{', '.join(given)}: {exc}; write def {function.__name__ if inspect.isfunction(function) else 'f'}"
            "(data_source, solution_str, ground_truth, extra_info, **kwargs), and see reward.options"
        ) from exc


def _read(result: object) -> RewardResult:
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"the reward function returned a dict without 'score': {sorted(map(str, result))}")
        extra = {
            str(name): float(value) for name, value in result.items() if name != "score" and isinstance(value, Real)
        }
        return RewardResult(outcome=SCORED, score=_number(result["score"]), metrics=extra)
    if isinstance(result, (tuple, list)) and result:
        return RewardResult(outcome=SCORED, score=_number(result[0]))
    return RewardResult(outcome=SCORED, score=_number(result))


def _number(value: object) -> float:
    try:
        return float(cast("float", value))
    except (TypeError, ValueError) as exc:
        raise TypeError(
            f"the reward function must return a number, a tuple that begins with one, or a dict with 'score'; got "
            f"{value!r:.80} ({type(value).__name__})"
        ) from exc


if TYPE_CHECKING:

    def _is_reward_function(x: VerlFunction) -> RewardFunction:
        return x
