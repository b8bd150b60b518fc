"""Writes a conversion down: the recipe as YAML with its reasons, the report, and the table of all keys."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING

import yaml

from verl_trainers.convert.rows import DEFAULT, MAPPED, SAME, UNKNOWN, UNSUPPORTED, show
from verl_trainers.convert.tables import TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_trainers.convert.inputs import Entry
    from verl_trainers.convert.rows import Fate
    from verl_trainers.convert.translate import Conversion, Line

__all__ = ["counts", "render_keys", "render_recipe", "render_report"]

_WIDTH = 120
KINDS = (SAME, MAPPED, DEFAULT, UNSUPPORTED, UNKNOWN)


def counts(conversion: Conversion) -> dict[str, int]:
    """Return how many keys met each fate."""
    return {kind: sum(fate.kind == kind for _, fate in conversion.fates) for kind in KINDS}


def render_recipe(conversion: Conversion, *, name: str) -> str:
    """Return the recipe as YAML. What is not supported stands at its end, as comments; `name` is of the input."""
    lines = [f"# Converted from {name}: {_summary(conversion)}."]
    sections: list[str] = []
    for key, line in conversion.recipe.items():
        *parents, leaf = key.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(parents, sections, strict=False)) if a != b), None)
        first = min(len(parents), len(sections)) if shared is None else shared
        if first == 0:
            lines.append("")
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(first, len(parents))]
        sections = parents
        lines += _leaf(leaf, line, "  " * len(parents))
    lost = [
        (entry, fate) for entry, fate in conversion.fates if fate.kind in (UNSUPPORTED, UNKNOWN) and not fate.values
    ]
    if lost:
        lines += ["", "# Not converted:"]
        lines += [" ".join(f"#   {_said(entry)}: {fate.why}{_near(fate)}".split("\n")) for entry, fate in lost]
    return _printable("\n".join(lines)) + "\n"


def _leaf(name: str, line: Line, indent: str) -> list[str]:
    text, said = f"{indent}{_scalar(name)}: {_scalar(line.value)}", " ".join(line.comment.split())
    if not said:
        return [text]
    if len(text) + len(said) + 3 <= _WIDTH:
        return [f"{text} # {said}"]
    comment = textwrap.wrap(said, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")
    return [*comment, text]


def _scalar(value: object) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False)
    return str(dumped).removesuffix("\n").removesuffix("\n...")


def render_report(conversion: Conversion) -> str:
    """Return what became of each key, those that need attention last."""
    lines = [_summary(conversion)]
    by_kind: dict[str, list[tuple[Entry, Fate]]] = defaultdict(list)
    for entry, fate in conversion.fates:
        by_kind[fate.kind if fate.kind != UNSUPPORTED else f"{UNSUPPORTED}, {fate.loses}"].append((entry, fate))
    same = [entry.key for entry, _ in by_kind.pop(SAME, [])]
    lines += _block(SAME, [", ".join(same)] if same else [])
    lines += _block(MAPPED, [_mapped(entry, fate) for entry, fate in by_kind.pop(MAPPED, [])])
    lines += _block(DEFAULT, _grouped(by_kind.pop(DEFAULT, [])))
    lines += _block("written out, since verl's default is another than ours", _added(conversion))
    unknown = by_kind.pop(UNKNOWN, [])
    for title, found in sorted(by_kind.items(), reverse=True):
        lines += _block(title, _grouped(found))
    lines += _block(UNKNOWN, [f"{_placed(entry)}: {fate.why}{_near(fate)}" for entry, fate in unknown])
    lines += _block("not asked for, and different here", conversion.notes)
    lines += _block("to do by hand, before it can run", conversion.missing)
    return _printable("\n".join(lines))


def _printable(text: str) -> str:
    """Return `text` with what no terminal or YAML file may hold written as an escape."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _summary(conversion: Conversion) -> str:
    found = counts(conversion)
    said = f"{len(conversion.fates)} keys: " + ", ".join(f"{number} {kind}" for kind, number in found.items())
    lost = conversion.defaults_lost
    return f"{said}; {lost} of verl's defaults not supported" if lost else said


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _mapped(entry: Entry, fate: Fate) -> str:
    new = ", ".join(f"{key}={show(value)}" for key, value in fate.values.items())
    return f"{_placed(entry)} → {new}: {fate.why}"


def _grouped(found: Sequence[tuple[Entry, Fate]]) -> list[str]:
    """Return one line for each reason, with all keys that it holds for."""
    groups: dict[str, list[str]] = defaultdict(list)
    for entry, fate in found:
        taken = ", ".join(f"{key}={show(value)}" for key, value in fate.values.items())
        groups[f"{fate.why}{_near(fate)}{f' (taken: {taken})' if taken else ''}"].append(_placed(entry))
    return [f"{', '.join(keys)}: {why}" for why, keys in groups.items()]


def _added(conversion: Conversion) -> list[str]:
    return [f"{key}={show(conversion.recipe[key].value)}: {conversion.recipe[key].comment}" for key in conversion.added]


def _near(fate: Fate) -> str:
    return f"; nearest: {fate.near}" if fate.near else ""


def _placed(entry: Entry) -> str:
    return f"{_said(entry)} ({entry.place})"


def _said(entry: Entry) -> str:
    return f"{entry.key}={show(entry.value)}".replace("\n", " ")


def render_keys() -> str:
    """Return every upstream key that is known, and what becomes of it, as a Markdown table."""
    lines = ["| verl's key | becomes | because |", "|---|---|---|"]
    rows = sorted(TABLE, key=lambda row: row.key)
    cells = [(f"`{row.key}`", row.becomes, row.why) for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)])
