"""Applies the tables to an input: one fate for each of its keys, and a recipe that our loader takes.

Owns what no single row can know: keys that set the same of ours, upstream's defaults that have to be written out
because ours are others, and what is still missing in the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_trainers.config.build import build_run_config, leaf_keys
from verl_trainers.config.check import check_relations
from verl_trainers.config.mistakes import nearest
from verl_trainers.config.sources import MISSING, Sources
from verl_trainers.convert.lookup import find_row
from verl_trainers.convert.rows import ITSELF, MAPPED, SAME, UNKNOWN, UNSUPPORTED, Fate, keep, refuse
from verl_trainers.convert.settings import Settings, is_legal, misfit, nested
from verl_trainers.convert.tables import TABLE
from verl_trainers.convert.tables.asynchrony import mode_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_trainers.convert.inputs import Entry, Source
    from verl_trainers.convert.rows import Row

__all__ = ["Conversion", "Line", "convert"]

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model.path"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One value of the recipe."""

    value: object
    comment: str = ""
    """Where it comes from; empty for a key that was taken as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A recipe, and how it came about."""

    recipe: Mapping[str, Line]
    """Our key → value, in the order of the input."""
    fates: tuple[tuple[Entry, Fate], ...]
    """One for each key of the input, in order."""
    added: tuple[str, ...]
    """Our keys that no key of the input asked for: the mode, and upstream's defaults that differ from ours."""
    defaults_lost: int
    """How many defaults of upstream's are not supported, so that the recipe has the nearest; `missing` says which."""
    notes: tuple[str, ...]
    """What upstream does when nothing is said, and cannot be asked for here."""
    missing: tuple[str, ...]
    """What has to be given or decided by hand before the recipe can run."""

    @property
    def is_whole(self) -> bool:
        """Whether the recipe does all that the input asks for."""
        return not self.missing and all(fate.kind not in (UNSUPPORTED, UNKNOWN) for _, fate in self.fates)


def convert(source: Source) -> Conversion:
    """Convert what was read. Never fails: what cannot be converted is in the result."""
    last = {entry.key: entry for entry in source.entries}
    values = {key: entry.value for key, entry in last.items() if not entry.problem and entry.value != MISSING}
    ours = not source.launched and not source.bases and _is_ours(last)
    mode = _mode(source, values)
    settings = Settings(values=values, mode=mode, defaults=_defaults(values, mode))
    fates = [_fate(entry, last[entry.key] is entry, ours, settings) for entry in source.entries]
    fates = [
        keep("a name of the input's own, put in where it is referred to")
        if fate.kind == UNKNOWN and entry.key in source.referred
        else fate
        for entry, fate in zip(source.entries, fates, strict=True)
    ]
    taken, fates = _take(source.entries, fates)
    recipe = {key: Line(value=value, comment=why) for key, (value, why) in taken.items()}
    missing = list(source.notes)
    unsaid = [] if ours else _unsaid(settings, has_mode="trainer.mode" in recipe)
    added: dict[str, Line] = {}
    notes: list[str] = []
    defaults_lost = 0
    for name, fate in unsaid:
        new = {key: Line(value=value, comment=_comment(name, fate)) for key, value in fate.values.items()}
        new = {key: line for key, line in new.items() if key not in {*recipe, *added}}
        if fate.kind == UNSUPPORTED and (new or not fate.values):
            defaults_lost += bool(new)
            (missing if new else notes).append(f"{name}: {fate.why}{f'; nearest: {fate.near}' if fate.near else ''}")
        added |= new
    recipe |= added
    missing += [*_bases(source), *_hub_names(recipe), *_mistakes(recipe)]
    return Conversion(
        recipe=dict(sorted(recipe.items(), key=lambda item: _position(item[0]))),
        fates=tuple(zip(source.entries, fates, strict=True)),
        added=tuple(added),
        defaults_lost=defaults_lost,
        notes=tuple(notes),
        missing=tuple(missing),
    )


def _is_ours(keys: Mapping[str, Entry]) -> bool:
    """Whether the input is a recipe of ours: it has keys that only we know, and none that only upstream knows."""
    return any(is_legal(key) and find_row(key) is None for key in keys) and all(
        is_legal(key) or find_row(key) is None for key in keys
    )


def _mode(source: Source, values: Mapping[str, object]) -> str:
    launched = " ".join((source.launched, *source.bases))
    for name, mode in (("fully_async", "fully_async"), ("one_step_off", "one_step_off")):
        if name in launched:
            return mode
    chosen = values.get("trainer.v1.trainer_mode")
    if isinstance(chosen, str):
        return chosen
    if any(key.startswith("async_training.") and find_row(key) is not None for key in values):
        return "fully_async"
    if not launched and any(key in values for key in ("rollout.nnodes", "rollout.n_gpus_per_node")):
        return "one_step_off"
    return "sync"


def _defaults(values: Mapping[str, object], mode: str) -> dict[str, object]:
    """Return upstream's defaults that translations read."""
    dynamic = values.get(f"{_ACTOR}.use_dynamic_bsz", False)
    return {
        **{row.key: row.default for row in TABLE if row.default is not None},
        f"{_ACTOR}.clip_ratio_low": 0.2,
        f"{_ACTOR}.clip_ratio_high": 0.2,
        f"{_REF}.log_prob_use_dynamic_bsz": dynamic,
        "algorithm.rollout_correction.bypass_mode": mode in ("fully_async", "one_step_off"),
        "actor_rollout_ref.actor.strategy": "fsdp",
    }


def _fate(entry: Entry, is_last: bool, ours: bool, settings: Settings) -> Fate:
    if not is_last:
        return keep("is set again later")
    if entry.value == MISSING:
        return keep("??? is no value yet")
    row = find_row(entry.key)
    if entry.problem:
        fate = refuse("") if row is None else row.decide(entry.value, settings)
        return replace(refuse(entry.problem) if fate.values or not fate.why else fate, values={})
    if ours or row is None or (row.yields and is_legal(entry.key)):
        if is_legal(entry.key):
            return _fitting(Fate(kind=SAME, values={entry.key: entry.value}))
        return _unknown(entry.key) if row is None else row.decide(entry.value, settings)
    return _fitting(_targeted(row, entry.key, row.decide(entry.value, settings)))


def _unknown(key: str) -> Fate:
    near = nearest(key, [row.key for row in TABLE if "*" not in row.key])
    same_name = next((row.key for row in TABLE if row.key.rpartition(".")[2] == key.rpartition(".")[2]), None)
    return Fate(kind=UNKNOWN, why="neither verl nor we have this key", near=near or same_name or "")


def _targeted(row: Row, key: str, fate: Fate) -> Fate:
    """Put the key, and what its pattern stood for, into the targets of `fate`."""
    match = row.match(key)
    rest = match.group(match.lastindex) if match is not None and match.lastindex else ""
    names = {target: key if target == ITSELF else target.replace("**", rest) for target in fate.values}
    return replace(fate, values={names[target]: value for target, value in fate.values.items()})


def _fitting(fate: Fate) -> Fate:
    """Return `fate`, or that the value is none that we take."""
    values = {key: _decoded(key, value) for key, value in fate.values.items()}
    for key, value in values.items():
        wrong = "" if _from_environment(value) else misfit(key, value)
        if wrong and value is None:
            return keep("not set; our default holds")
        if wrong:
            return refuse(f"{key} {wrong}")
    return replace(fate, values=values)


def _from_environment(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def _decoded(key: str, value: object) -> object:
    """Return `value` so that what stands in the environment is read as a number where one is needed."""
    if isinstance(value, str) and _ENVIRONMENT.fullmatch(value) and misfit(key, "text") and misfit(key, value):
        return f"${{oc.decode:{value}}}"
    return value


def _take(entries: Sequence[Entry], fates: Sequence[Fate]) -> tuple[dict[str, tuple[object, str]], list[Fate]]:
    """Return our values, and the fates after keys that contradict each other were told apart.

    What is translated counts more than what has our name already, and that more than the nearest thing to what is not
    supported; between equals the first name in the alphabet counts, so that the order of keys does not matter.
    """
    rank = {MAPPED: 0, SAME: 1, UNSUPPORTED: 2}
    order = sorted(range(len(fates)), key=lambda index: (rank.get(fates[index].kind, 3), entries[index].key))
    owners: dict[str, int] = {}
    settled = list(fates)
    for index in order:
        for key, value in fates[index].values.items():
            owner = owners.setdefault(key, index)
            other = fates[owner].values[key]
            if owner != index and other != value and fates[index].kind != UNSUPPORTED:
                settled[index] = refuse(f"{entries[owner].key} makes {key} {other}, which was taken")
    taken: dict[str, tuple[object, str]] = {}
    for index, (entry, fate) in enumerate(zip(entries, fates, strict=True)):
        for key, value in fate.values.items():
            if owners[key] == index:
                asked = "" if fate.kind == SAME else f"{entry.key}={entry.value}"
                taken[key] = (value, _comment(asked, fate))
    return taken, settled


def _comment(asked: str, fate: Fate) -> str:
    """Return what stands beside a value in the recipe: who asked for it, and why it is another."""
    said = ": ".join(part for part in (asked, fate.why) if part)
    return f"NOT SUPPORTED: {said}" if fate.kind == UNSUPPORTED else said


def _unsaid(settings: Settings, *, has_mode: bool) -> list[tuple[str, Fate]]:
    """Return what upstream does when nothing is said, where we would do something else."""
    found = [] if has_mode else [("trainer.mode", mode_of(settings))]
    for row in TABLE:
        if row.default is not None and not settings.has(row.key):
            value = settings.get(row.key)
            fate = _fitting(_targeted(row, row.key, row.decide(value, settings)))
            if fate.kind in (SAME, MAPPED, UNSUPPORTED):
                found.append((f"verl's default {row.key}={value}", fate))
    return found


def _position(key: str) -> tuple[int, str]:
    """Return where `key` stands in the schema, so that the order of the input does not show in the recipe."""
    leaves = list(leaf_keys())
    owner = key
    while owner not in leaves and owner:
        owner = owner.rpartition(".")[0]
    return (leaves.index(owner) if owner else len(leaves)), key


def _hub_names(recipe: Mapping[str, Line]) -> list[str]:
    line = recipe.get(_MODEL)
    if line is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(line.value)) or Path(str(line.value)).is_dir():
        return []
    return [f"{_MODEL}: {line.value} is no folder here; if it is a name on a hub, download it and give the folder"]


def _bases(source: Source) -> list[str]:
    return [f"{base}: weights are sharded by FSDP2 only" for base in source.bases if "megatron" in base]


def _mistakes(recipe: Mapping[str, Line]) -> list[str]:
    """Return what keeps the recipe from running, as far as it can be told without data and models."""
    outside = {key for key, line in recipe.items() if _from_environment(line.value) or isinstance(line.value, list)}
    plain = {key: line.value for key, line in recipe.items() if not _from_environment(line.value)}
    config, mistakes = build_run_config(Sources(tree=nested(plain), places={}))
    return [
        str(mistake)
        for mistake in [*mistakes, *check_relations(config)]
        if mistake.key not in outside and not outside & set(mistake.uses)
    ]
