"""Mistakes in a configuration, collected so that all of them are shown at once and each is fixed in one go."""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_trainers.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["Mistake", "config_error", "nearest"]

_KEY = re.compile(r"(?P<key>[a-z_]\w*(\.[\w.:\-\[\]]+)?)(=(?P<value>\S+))?: ")
_SECTIONS = frozenset(field.name for field in dataclasses.fields(RunConfig))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake: where, what, and how to fix it."""

    key: str
    """Full key; empty when the file as a whole is meant."""
    text: str
    """What is wrong, with the values, and the fix."""
    place: str = ""
    """``file:line`` or the override that set the key; empty when nobody set it."""
    uses: tuple[str, ...] = ()
    """Further keys that this rule reads. It says nothing while one of them is broken itself."""

    @classmethod
    def parse(cls, message: str, *, key: str = "") -> Mistake:
        """Return the mistake that an error's message tells.

        It may begin with ``key: `` or ``key=value: ``; else the mistake is one of `key`.
        """
        found = _KEY.match(message)
        if found is None or found["key"].partition(".")[0] not in _SECTIONS:
            return cls(key=key, text=message)
        value = f"is {found['value']}: " if found["value"] is not None else ""
        return cls(key=found["key"], text=f"{value}{message[found.end() :]}")

    @classmethod
    def parse_all(cls, message: str, *, key: str = "") -> list[Mistake]:
        """Return the mistakes of an error with several lines, one for each line that begins with a key.

        Other lines belong to the mistake above them, and are indented.
        """
        texts: list[str] = []
        for line in message.splitlines():
            found = _KEY.match(line)
            if not texts or (found is not None and found["key"].partition(".")[0] in _SECTIONS):
                texts.append(line)
            elif line.strip():
                texts[-1] += f"\n{line if line.startswith(' ') else f'  {line}'}"
        return [cls.parse(text, key=key) for text in texts]

    def follows_from(self, broken: Collection[str]) -> bool:
        """Whether one of the keys that this mistake reads, or a section around it, is broken itself."""
        return any(
            key == wrong or key.startswith(f"{wrong}.") for key in (self.key, *self.uses) if key for wrong in broken
        )

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.text) if part)


def config_error(mistakes: Sequence[Mistake]) -> ConfigError:
    """Return one error with a line for each mistake."""
    return ConfigError("\n".join(dict.fromkeys(str(mistake) for mistake in mistakes)))


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice that looks most like `word`; None when less than `cutoff` of any agrees with it."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)), None)
