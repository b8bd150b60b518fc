"""Plug-ins of every wrong kind, and right ones in unusual shapes. Imported by path, as a user's module is."""

from __future__ import annotations

import abc
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from verl_contracts.rewards import RewardFunction, RewardResult
from verl_contracts.samples import SCORED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Deadline
    from verl_contracts.rewards import RewardRequest
    from verl_contracts.rollout import LLMClient
    from verl_contracts.samples import GroupRequest, Trajectory

T = TypeVar("T")

not_a_class = 3


class Right:
    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        return RewardResult(outcome=SCORED, score=float(len(response)))


class Outer:
    class Inner(Right):
        pass


class Missing:
    def scores(self, request: RewardRequest, response: str, /) -> RewardResult:
        raise NotImplementedError


class Arity:
    def score(self, request: RewardRequest) -> RewardResult:
        raise NotImplementedError


class TooMuch:
    def score(self, request: RewardRequest, response: str, extra: int) -> RewardResult:
        raise NotImplementedError


class Async:
    async def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        raise NotImplementedError


class IsAttribute:
    score = 1.0


class IsProperty:
    @property
    def score(self) -> float:
        return 1.0


class EmptyBody(RewardFunction):  # type: ignore[misc, unused-ignore]
    """Inherits the Protocol and writes nothing: every call would return None."""


class Abstract(abc.ABC):
    @abc.abstractmethod
    def score(self, request: RewardRequest, response: str, /) -> RewardResult: ...


class PositionalConstructor(Right):
    def __init__(self, weight: float, /) -> None:
        self.weight = weight


class WithOptions(Right):
    def __init__(self, *, weight: float, power: int = 1) -> None:
        self.weight = weight
        self.power = power


class Newer(Right):
    contract_version: ClassVar[str] = "0.9"


class OtherMajor(Right):
    contract_version: ClassVar[str] = "1.0"


class Malformed(Right):
    contract_version: ClassVar[str] = "newest"


class Fitting(Right):
    contract_version: ClassVar[str] = "0.1"


class Loop:
    def __init__(self, *, client: LLMClient, turns: int = 1) -> None:
        self.client = client
        self.turns = turns

    async def run(self, request: GroupRequest, sample: int, /, *, deadline: Deadline) -> tuple[Trajectory, ...]:
        raise NotImplementedError


class LoopWithoutClient(Loop):
    def __init__(self, *, clint: LLMClient) -> None:
        super().__init__(client=clint)


class LoopKeyword:
    def __init__(self, *, client: LLMClient) -> None:
        self.client = client

    async def run(self, request: GroupRequest, sample: int, /, *, dead_line: Deadline) -> tuple[Trajectory, ...]:
        raise NotImplementedError


class LoopStream(Loop):
    async def run(  # type: ignore[override]
        self, request: GroupRequest, sample: int, /, *, deadline: Deadline
    ) -> AsyncIterator[Trajectory]:
        trajectories: tuple[Trajectory, ...] = ()
        for trajectory in trajectories:
            yield trajectory


class LoopSync(Loop):
    def run(  # type: ignore[override]
        self, request: GroupRequest, sample: int, /, *, deadline: Deadline
    ) -> tuple[Trajectory, ...]:
        raise NotImplementedError


class LoopAwaitable(Loop):
    """A plain method is as good as a coroutine when it says that it returns an awaitable."""

    def run(  # type: ignore[override]
        self, request: GroupRequest, sample: int, /, *, deadline: Deadline
    ) -> Awaitable[tuple[Trajectory, ...]]:
        raise NotImplementedError


def traced(function: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> T:
        return function(*args, **kwargs)

    return wrapper


class Decorated:
    @traced
    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        raise NotImplementedError


class Loose:
    def score(self, *args: object, **options: object) -> RewardResult:
        raise NotImplementedError


class Static:
    @staticmethod
    def score(request: RewardRequest, response: str = "", more: int = 0) -> RewardResult:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int
    rate: float = 0.5
    names: tuple[str, ...] = ()
    note: str | None = None


@dataclass
class Thawed:
    size: int = 1
