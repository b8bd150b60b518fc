"""Where a replica can be called, and checked answers of remote calls.

`Caller.call` returns `object`, because a runtime knows no types. Each proxy says here which type it expects, so that an
answer of another kind is an error at the place where it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from verl_contracts.rollout import Capability
    from verl_contracts.runtime import ActorRef

__all__ = ["ReplicaAddress", "answer", "answers"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """A replica's name and the actor that hosts it."""

    replica: str
    actor: ActorRef
    capacity: int
    """Sequences that it decodes at once."""
    capabilities: frozenset[Capability] = frozenset()


def answer(value: object, kind: type[T], /, *, method: str) -> T:
    """Return `value`, which the remote `method` answered, as `kind`. Raises TypeError for anything else."""
    if not isinstance(value, kind):
        raise TypeError(f"{method} answered {type(value).__name__}; {kind.__name__} was expected")
    return value


def answers(value: object, kind: type[T], /, *, method: str) -> tuple[T, ...]:
    """Return `value`, which the remote `method` answered, as a tuple of `kind`. Raises TypeError for anything else."""
    return tuple(answer(item, kind, method=method) for item in answer(value, tuple, method=method))
