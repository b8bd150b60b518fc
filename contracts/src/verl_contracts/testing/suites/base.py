"""What every suite has in common: real or virtual time, a hard limit, and a guard against dropping a test unseen.

The guard is here because a conformance kit whose tests can be overridden proves nothing: a test of a suite may be
replaced only by a strict xfail with a reason, which fails as soon as the implementation meets the contract after all.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, TypeVar

import pytest

from verl_contracts.clock import SystemClock
from verl_contracts.testing.virtual import VirtualClock, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from verl_contracts.clock import Clock

__all__ = ["ContractSuite", "contract_since"]

T = TypeVar("T")
F = TypeVar("F")

_SUITES: set[type] = set()


def contract_since(major: int, minor: int) -> Callable[[F], F]:
    """Mark a test with the contract version that introduced what it tests.

    It is skipped, visibly, for implementations that declare an older version.
    """

    def mark(function: F) -> F:
        function.contract_since = (major, minor)  # type: ignore[attr-defined]
        return function

    return mark


class ContractSuite:
    """Base of the suites. Subclasses that are suites themselves pass ``suite=True`` and inherit from `abc.ABC` too."""

    implements: ClassVar[str] = "0.1"
    """Contract version that the implementation was written for."""
    virtual: ClassVar[bool] = False
    """Whether the tests run in virtual time; only for implementations without threads, processes and sockets."""
    limit_s: ClassVar[float] = 60.0
    """Hard limit for each test, in real time."""

    def __init_subclass__(cls, suite: bool = False) -> None:
        """Refuse overridden tests, wherever in the hierarchy the override stands."""
        super().__init_subclass__()
        if suite:
            _SUITES.add(cls)
        protected = {name: base for base in reversed(cls.__mro__) for name in vars(base) if _is_test_of(base, name)}
        for name, owner in protected.items():
            winner = next(base for base in cls.__mro__ if name in vars(base))
            if not _is_suite(winner) and not _excused(vars(winner)[name]):
                raise TypeError(
                    f"{cls.__qualname__}.{name} overrides a test of {owner.__qualname__}. Give yours another name, or "
                    "mark it @pytest.mark.xfail(strict=True, reason=...) and call super()"
                )

    @pytest.fixture(autouse=True)
    def _skip_newer(self, request: pytest.FixtureRequest) -> None:
        since: tuple[int, int] = getattr(request.function, "contract_since", (0, 1))
        major, minor = (int(part) for part in self.implements.split("."))
        if since > (major, minor):
            pytest.skip(f"tests contract {since[0]}.{since[1]}; the implementation declares {self.implements}")

    def run(self, case: Callable[[Clock], Coroutine[object, object, T]]) -> T:
        """Run an asynchronous test body on a loop of its own, in real or virtual time, within the limit."""
        if self.virtual:

            async def virtually() -> T:
                return await case(VirtualClock(asyncio.get_running_loop()))

            return run_virtual(virtually())

        async def really() -> T:
            async with asyncio.timeout(self.limit_s):
                return await case(SystemClock())

        return asyncio.run(really())


def _is_suite(cls: type) -> bool:
    return cls in _SUITES


def _is_test_of(cls: type, name: str) -> bool:
    return name.startswith("test_") and _is_suite(cls)


def _excused(test: object) -> bool:
    marks: list[pytest.Mark] = getattr(test, "pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("strict") and mark.kwargs.get("reason") for mark in marks)
