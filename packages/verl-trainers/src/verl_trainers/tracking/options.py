"""Whose options are whose in `trainer.logger_options`, whichever way a tracker is named there.

A class path holds dots, and so do keys: an override splits it into nested sections. Owns putting it together again, so
that options which were meant for a tracker never silently go to none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl_trainers.config.mistakes import nearest

__all__ = ["ROOT", "GivenOptions", "SortedOptions", "sort_options"]

ROOT = "trainer.logger_options"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """What was given for one tracker."""

    key: str
    """Full key, as it was written."""
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedOptions:
    """The options of all trackers."""

    by_name: Mapping[str, GivenOptions]
    """Name in `trainer.logger` → its options; those without any are absent."""
    problems: Mapping[str, str]
    """Full key that belongs to no tracker → why, and how to fix it."""

    def of(self, name: str) -> GivenOptions:
        """Return the options of `name`, which may be none."""
        return self.by_name.get(name, GivenOptions(key=f"{ROOT}.{name}", value={}))


def sort_options(given: Mapping[str, object], chosen: Sequence[str]) -> SortedOptions:
    """Sort `given` by the names in `chosen`.

    A tracker is named as it is in `chosen`, with its class path spread over nested sections, or by the bare name of its
    class where no other has the same.
    """
    bare = {name: re.split("[.:]", name)[-1] for name in chosen}
    counts = Counter(bare.values())
    forms = {short: name for name, short in bare.items() if counts[short] == 1}
    forms |= {name.replace(":", "."): name for name in chosen} | {name: name for name in chosen}
    found: dict[str, GivenOptions] = {}
    problems: dict[str, str] = {}
    for path, value in _parts(given, forms, ""):
        key, name = f"{ROOT}.{path}", forms.get(path)
        if name is None:
            problems[key] = _stray(path, [each for each in chosen if bare[each] == path], chosen, forms)
        elif name not in found:
            found[name] = GivenOptions(key=key, value=value)
        elif found[name].key == key:  # the class path as one key in one source, and spread over sections in another
            found[name] = GivenOptions(key=key, value=_merged(found[name].value, value))
        else:
            problems[key] = f"gives the options of {name!r} a second time; they stand at {found[name].key} already"
    return SortedOptions(by_name=found, problems=problems)


def _parts(tree: Mapping[str, object], forms: Mapping[str, str], prefix: str) -> Iterator[tuple[str, object]]:
    """Yield what stands at each name of a tracker, and each section that leads to none."""
    for part, value in tree.items():
        path = f"{prefix}{part}"
        if path not in forms and isinstance(value, Mapping) and any(form.startswith(f"{path}.") for form in forms):
            yield from _parts(value, forms, f"{path}.")
        else:
            yield path, value


def _merged(first: object, then: object) -> object:
    return {**first, **then} if isinstance(first, Mapping) and isinstance(then, Mapping) else then


def _stray(path: str, alike: Sequence[str], chosen: Sequence[str], forms: Mapping[str, str]) -> str:
    if alike:
        return f"may mean {' or '.join(map(repr, alike))}; write for example {ROOT}.{alike[0]}.OPTION=VALUE"
    near = nearest(path, forms)
    if near is not None:
        advice = f"did you mean {near!r}? Write {ROOT}.{near}.OPTION=VALUE"
    else:
        advice = f"chosen are: {', '.join(chosen)}"
    return f"options of a tracker that trainer.logger does not choose; {advice}"
