"""Cheap pickling for the dataclasses that cross processes by the hundred in every step.

What `dataclasses` generates for frozen, slotted classes looks its fields up again for each object, which made pickling
a fifth of an agent worker's time.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cheap_pickle"]

T = TypeVar("T")


def cheap_pickle(cls: type[T]) -> type[T]:
    """Make objects of `cls`, a frozen dataclass with slots, pickle as their class and a tuple of values.

    Like any unpickling it runs neither `__init__` nor `__post_init__`: what was valid when it was made still is.
    """
    names = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    read = attrgetter(*names)
    values: Callable[[object], tuple[object, ...]] = read if len(names) > 1 else lambda self: (read(self),)

    def reduce(self: object) -> tuple[object, ...]:
        return _restored, (cls, values(self))

    cls.__reduce__ = reduce  # type: ignore[method-assign]
    _NAMES[cls] = names
    return cls


_NAMES: dict[type, tuple[str, ...]] = {}
_set = object.__setattr__


def _restored(cls: type, values: tuple[object, ...]) -> object:
    new: object = object.__new__(cls)
    for name, value in zip(_NAMES[cls], values, strict=True):
        _set(new, name, value)
    return new
