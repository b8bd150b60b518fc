"""Where values come from: a YAML file and ``a.b=c`` overrides, merged and interpolated by OmegaConf.

Owns the knowledge of which line or override set a key, because a message without it sends people searching. What leaves
this module is a plain tree of dicts, lists and scalars.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from verl_trainers.config.mistakes import Mistake, config_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Sources", "read_sources"]

RUN_DIR = "run_dir"
"""Root key that the caller defines, for ``${run_dir}``; not part of the schema."""
MISSING = "???"
"""OmegaConf's mark of a value that must be given."""
_MAX_BROKEN = 100
_MAX_DEPTH = 64
"""Levels of sections and lists in a file; deeper ones exhaust the stack of whoever reads them."""
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """A merged, plain tree."""

    tree: Mapping[str, object]
    places: Mapping[str, str]
    """Full key → ``file:line`` or ``override 'a.b=c'``."""
    mistakes: tuple[Mistake, ...] = ()
    """Interpolations that cannot be resolved, and values that must be given; their keys hold None."""
    broken: frozenset[str] = field(default_factory=frozenset)
    """Their keys."""

    def place(self, key: str) -> str:
        """Return who set `key`, else something in it, else the nearest section around it; empty when nobody did."""
        inside = [place for name, place in self.places.items() if key and name.startswith(f"{key}.")]
        if inside and key not in self.places:
            return inside[-1]
        while key:
            if key in self.places:
                return self.places[key]
            key = key.rpartition(".")[0]
        return ""


def read_sources(source: Path | None, overrides: Sequence[str] = (), *, run_dir: str = "") -> Sources:
    """Read `source` and put `overrides` on top; both may use ``${run_dir}``.

    Raises `ConfigError` for a file that is not YAML and for overrides that are not ``key=value``.
    """
    places: dict[str, str] = {}
    merged = OmegaConf.create({}) if source is None else _read_file(source, places)
    if RUN_DIR in merged:
        raise config_error([Mistake(key=RUN_DIR, place=places[RUN_DIR], text="is set by the command; write --out DIR")])
    wrong = [text for text in overrides if not text.partition("=")[1] or not text.partition("=")[0].strip()]
    if wrong:
        raise config_error([Mistake(key="", place=f"override {text!r}", text="must be key=value") for text in wrong])
    ours = [text for text in overrides if text.partition("=")[0].strip().partition(".")[0] == RUN_DIR]
    if ours:
        advice = "is set by the command; write --out DIR"
        raise config_error([Mistake(key=RUN_DIR, place=f"override {text!r}", text=advice) for text in ours])
    for text in overrides:
        key, place = text.partition("=")[0].strip(), f"override {text!r}"
        try:
            given = OmegaConf.from_dotlist([text])
            merged = _put(merged, given, key)
        except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError, RecursionError) as exc:
            raise config_error([Mistake(key="", place=place, text=_first_line(exc))]) from exc
        inner = _keys(OmegaConf.to_container(given, resolve=False), "")
        places.update({name: place for name in inner if name.startswith(f"{key}.")} | {key: place})
    OmegaConf.update(merged, RUN_DIR, run_dir)
    return _resolve(merged, places)


def _read_file(path: Path, places: dict[str, str]) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise config_error([Mistake(key="", place=str(path), text=f"cannot be read: {_first_line(exc)}")]) from exc
    try:
        _check_nesting(text, path.name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _collect_places(root, "", path.name, places)
        loaded = OmegaConf.create(text) if root is not None else OmegaConf.create({})
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark is not None else ""
        raise config_error([Mistake(key="", place=f"{path}{line}", text=f"not YAML: {exc.problem}")]) from exc
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as exc:
        raise config_error([Mistake(key="", place=str(path), text=_first_line(exc))]) from exc
    if not isinstance(loaded, DictConfig) or (root is not None and not isinstance(root, yaml.MappingNode)):
        raise config_error([Mistake(key="", place=str(path), text="must hold sections (key: value lines)")])
    return loaded


def _put(merged: DictConfig, given: DictConfig, key: str) -> DictConfig:
    """Return `merged` with `given`, which sets `key`, on top. A list for a section is left to the schema to refuse."""
    try:
        return _as_dict(OmegaConf.merge(merged, given))
    except TypeError:  # a list meets a section
        try:
            OmegaConf.update(merged, key, OmegaConf.select(given, key), merge=False)
        except (TypeError, ValueError) as exc:
            raise ValueError(f"{key} names a key in a list, which has none; give the whole list") from exc
        return merged


def _check_nesting(text: str, file: str) -> None:
    """Refuse values that have no end, or one too far away, before anybody walks them. Raises `ConfigError`."""
    around: list[str | None] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        problem = ""
        if isinstance(event, yaml.CollectionStartEvent):
            around.append(event.anchor)
            if len(around) > _MAX_DEPTH:
                problem = f"is nested deeper than {_MAX_DEPTH} levels"
        elif isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in around:
            problem = f"*{event.anchor} is a part of the value that it stands for, so it has no end"
        if problem:
            raise config_error([Mistake(key="", place=f"{file}:{event.start_mark.line + 1}", text=problem)])


def _collect_places(node: yaml.Node | None, prefix: str, file: str, places: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == _NULL:
                problem = f"{key.value or 'nothing'} is no key; write a name, or put it in quotes"
                raise config_error([Mistake(key="", place=f"{file}:{key.start_mark.line + 1}", text=problem)])
            path = f"{prefix}{key.value}"
            places[path] = f"{file}:{key.start_mark.line + 1}"
            _collect_places(value, f"{path}.", file, places)


def _resolve(merged: DictConfig, places: Mapping[str, str]) -> Sources:
    """Resolve interpolations, noting each that fails instead of stopping at the first."""
    mistakes: list[Mistake] = []
    while len(mistakes) < _MAX_BROKEN:
        try:
            tree = OmegaConf.to_container(merged, resolve=True)
            break
        except InterpolationResolutionError as exc:
            key = str(exc.full_key)
            mistakes.append(Mistake(key=key, place=places.get(key, ""), text=_first_line(exc)))
            OmegaConf.update(merged, key, None)
        except OmegaConfBaseException as exc:
            raise config_error([Mistake(key="", text=_first_line(exc))]) from exc
    else:
        raise config_error(mistakes)
    plain: dict[str, object] = {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
    del plain[RUN_DIR]
    for key in _missing(plain, ""):
        mistakes.append(Mistake(key=key, place=places.get(key, ""), text=f"must be given: {key}=..."))
    broken = frozenset(mistake.key for mistake in mistakes)
    return Sources(tree=plain, places=places, mistakes=tuple(mistakes), broken=broken)


def _missing(tree: Mapping[str, object], prefix: str) -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        if value == MISSING:
            found.append(f"{prefix}{key}")
        elif isinstance(value, dict):
            found += _missing(value, f"{prefix}{key}.")
    return found


def _keys(tree: object, prefix: str) -> Iterator[str]:
    """Yield the full key of everything in `tree`."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from _keys(value, f"{prefix}{name}.")


def _as_dict(config: object) -> DictConfig:
    if not isinstance(config, DictConfig):
        raise ValueError("an override must name a key")
    return config


def _first_line(exc: BaseException) -> str:
    if isinstance(exc, RecursionError):
        return "is nested too deeply"
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem:
        return f"not YAML: {exc.problem}"
    return str(exc).strip().partition("\n")[0]
