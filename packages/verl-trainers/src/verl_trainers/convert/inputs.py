"""Reads what is converted: a Hydra YAML file, a launch script, or a launch line, as one list of keys with places.

Owns the order in which values override each other, and refuses what is not a launch of a trainer. Every key of the
input becomes an entry, also one that is overridden later, so that a report can account for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_contracts.errors import ConfigError
from verl_trainers.convert.shell import OPAQUE, read_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Entry", "Source", "read_input"]

_MODULES = re.compile(r"(?:^|[./])((?:async_)?main_ppo\w*|main_dapo|fully_async_main|one_step_off_main)(?:\.py)?$")
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")
_CONFIG = {"--config-name": "name", "-cn": "name", "--config-path": "folder", "-cp": "folder", "--config-dir": "folder"}
_SAYING = frozenset({"echo", "printf", ":", "cat", "grep", "pgrep", "pkill", "kill", "ls", "tee", "test", "[", "[["})
"""Commands that may name a trainer and start none."""
_BASES = ("ppo_trainer", "ppo_megatron_trainer", "fully_async_ppo_trainer", "one_step_off_ppo_trainer", "dapo_trainer")
"""Upstream's own configurations, which others begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of the input."""

    key: str
    value: object
    place: str
    """``file:line``, or ``argument``."""
    problem: str = ""
    """Why the value cannot be known; empty when it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that the input says."""

    entries: tuple[Entry, ...]
    """In order; a later one overrides an earlier one of the same key."""
    launched: str = ""
    """Module or file that is launched; empty for a YAML file and for overrides alone."""
    bases: tuple[str, ...] = ()
    """Upstream's configurations that it begins with."""
    referred: frozenset[str] = frozenset()
    """Keys that the values of others refer to."""
    notes: tuple[str, ...] = ()
    """What could not be known, and has to be looked at."""


@dataclass(slots=True)
class _Collected:
    entries: list[Entry] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_input(words: Sequence[str]) -> Source:
    """Read ``FILE [override …]``, ``SCRIPT [argument …]``, or the words of a launch line.

    Raises `ConfigError` for what cannot be read and for what launches no trainer.
    """
    if not words:
        raise ConfigError("nothing to convert: give a YAML file, a launch script, or the words of a launch line")
    first = Path(words[0])
    collected = _Collected()
    launched = ""
    if first.suffix in (".yaml", ".yml"):
        _read_yaml(first, collected)
        _read_overrides([(word, "argument") for word in words[1:]], collected, folder=first.parent)
    elif first.is_file():
        launched, arguments = _read_script(first, list(words[1:]), collected)
        _read_overrides(arguments, collected, folder=first.parent)
    elif len(words) == 1 and "=" not in words[0]:
        raise ConfigError(f"{words[0]}: no such file; a launch line has a=b words")
    else:
        launch = _find_launch([(word, "argument") for word in words])
        launched, arguments = launch or ("", [(word, "argument") for word in words])
        _read_overrides(arguments, collected, folder=Path())
    return Source(
        entries=tuple(_resolved(collected.entries)),
        referred=frozenset(name for entry in collected.entries for name in _REFERENCE.findall(str(entry.value))),
        launched=launched,
        bases=tuple(collected.bases),
        notes=tuple(collected.notes),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc


def _read_script(path: Path, arguments: list[str], collected: _Collected) -> tuple[str, list[tuple[str, str]]]:
    """Return what the only launch of a trainer in a script launches, and the words after it with their places."""
    try:
        commands, notes = read_commands(_read_text(path), arguments)
    except ValueError as exc:
        raise ConfigError(f"{path}: not a shell script: {exc}") from exc
    collected.notes += notes
    words = [[(word, f"{path.name}:{line}") for word, line in command.words] for command in commands]
    found = [
        (command, launch)
        for command, line in zip(commands, words, strict=True)
        if (launch := _find_launch(line)) is not None
    ]
    called = [launch for command, launch in found if not command.uncalled]
    launches = called or [launch for _, launch in found]
    if launches and not called:
        names = " and ".join(dict.fromkeys(command.uncalled for command, _ in found))
        collected.notes.append(f"the launch is in the function {names}, which nothing calls: its arguments are unknown")
    if len(launches) > 1:
        lines = ", ".join(arguments[0][1] for _, arguments in launches if arguments)
        raise ConfigError(f"{path}: launches {len(launches)} trainers ({lines}): give the words of one of them instead")
    if not launches:
        other = next((word for line in words for word, _ in line if re.match(r"(verl|recipe)\.\w", word)), None)
        what = f"; {other} is not one" if other else ""
        raise ConfigError(f"{path}: launches no trainer, as in: python3 -m verl.trainer.main_ppo a=b{what}")
    return launches[0]


def _find_launch(words: Sequence[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]] | None:
    """Return what a command launches and the words after it; None for one that only names a trainer, as `echo` does."""
    if not words or words[0][0] in _SAYING:
        return None
    for index, (word, _) in enumerate(words):
        is_run = index == 0 or word.endswith(".py") or re.fullmatch(r"-\w*m", words[index - 1][0])
        if is_run and _MODULES.search(word) and "=" not in word:
            return word, list(words[index + 1 :])
    return None


def _read_overrides(words: Sequence[tuple[str, str]], collected: _Collected, *, folder: Path) -> None:
    """Read Hydra's words: ``a=b``, ``+a=b``, ``++a=b``, ``~a``, and the flags that name a configuration."""
    flags: dict[str, str] = {}
    overrides: list[tuple[str, str]] = []
    waiting = ""
    for word, place in words:
        name, equals, rest = word.partition("=")
        if waiting:
            flags[_CONFIG[waiting]], waiting = word, ""
        elif name in _CONFIG:
            flags |= {_CONFIG[name]: rest} if equals else {}
            waiting = "" if equals else name
        elif _OVERRIDE.fullmatch(word) and (equals or word.startswith("~")):
            overrides.append((word, place))
        else:
            collected.notes.append(f"{place}: {word.replace(OPAQUE, '')} is no key=value, and was not read")
    if "name" in flags:
        _read_base(flags["name"], folder / flags.get("folder", ""), collected)
    for word, place in overrides:
        collected.entries += _override(word, place)


def _override(word: str, place: str) -> Iterator[Entry]:
    match = _OVERRIDE.fullmatch(word)
    sign, key, raw = match.groups() if match else ("", word, "")
    if sign == "~":
        yield Entry(key=key, value=None, place=place, problem="is taken out; upstream's code then decides")
    elif OPAQUE in (raw or ""):
        told = raw.replace(OPAQUE, "")
        yield Entry(key=key, value=told, place=place, problem=f"only a shell could tell the value of {told}; write it")
    else:
        yield from _leaves(key, _parse(raw or ""), lambda _: place)


def _parse(raw: str) -> object:
    """Return the value that Hydra would read; text when it is no YAML."""
    spaced = re.sub(r"((?<!\$)[{,]\s*[\w.+-]+):(?=[^\s/])", r"\1: ", raw) if raw.lstrip()[:1] in ("{", "[") else raw
    try:
        loaded = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={spaced}"]), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError):
        return raw
    return loaded.get("value") if isinstance(loaded, dict) else raw


def _read_base(name: str, folder: Path, collected: _Collected) -> bool:
    """Read the configuration `name`, or note it as upstream's; return whether it is known."""
    stem = PurePosixPath(name).name.removesuffix(".yaml").removesuffix(".yml")
    file = folder / f"{name.removesuffix('.yaml')}.yaml"
    if stem in _BASES:
        collected.bases.append(stem)
    elif file.is_file():
        _read_yaml(file, collected)
    else:
        collected.notes.append(f"the configuration {name!r} lies not beside the input, so its keys are not converted")
        return False
    return True


def _read_yaml(path: Path, collected: _Collected) -> None:
    text = _read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if root is not None else {}
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as exc:
        raise ConfigError(f"{path}: not a YAML file that Hydra could read: {_first_line(exc)}") from exc
    if not isinstance(tree, dict) or (root is not None and not isinstance(root, yaml.MappingNode)):
        raise ConfigError(f"{path}: must hold sections (key: value lines)")
    lines: dict[str, int] = {}
    _collect_lines(root, "", lines)
    defaults = tree.pop("defaults", None)
    if isinstance(defaults, list):
        unread = [
            str(item)
            for item in defaults
            if item != "_self_" and not (isinstance(item, str) and _read_base(item, path.parent, collected))
        ]
        problem = f"begins with {', '.join(unread)}, whose keys are not converted" if unread else ""
        place = f"{path.name}:{lines.get('defaults', 1)}"
        collected.entries.append(Entry(key="defaults", value=defaults, place=place, problem=problem))
    for name, value in tree.items():
        collected.entries += _leaves(str(name), value, lambda key: f"{path.name}:{lines.get(key, 1)}")


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
            _collect_lines(value, f"{prefix}{key.value}.", lines)


def _leaves(key: str, value: object, place: Callable[[str], str]) -> Iterator[Entry]:
    """Yield one entry for each leaf; an empty section is one too."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner, place)
    else:
        yield Entry(key=key, value=value, place=place(key))


def _resolved(entries: Sequence[Entry]) -> list[Entry]:
    """Return `entries` with what refers to other keys put in; what comes from the environment stays as it is."""
    tree = OmegaConf.create({})
    read = [entry if entry.problem else _enter(entry, tree) for entry in entries]
    return [entry if entry.problem else _resolve(entry, tree) for entry in read]


def _enter(entry: Entry, tree: DictConfig) -> Entry:
    try:
        OmegaConf.update(tree, entry.key, entry.value, force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError) as exc:
        return replace(entry, problem=f"is no key that Hydra would take: {_first_line(exc)}")
    return entry


def _resolve(entry: Entry, tree: DictConfig) -> Entry:
    text = str(entry.value)
    if "${" not in text or "${oc.env:" in text or "${run_dir}" in text:
        return entry
    try:
        found: object = OmegaConf.select(tree, entry.key)
        value = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException as exc:
        why = f"{entry.value} refers to what the input does not say ({_first_line(exc)}); write the value"
        return replace(entry, problem=why)
    return replace(entry, value=value)


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0]
