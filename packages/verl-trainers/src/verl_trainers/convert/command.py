"""`verl-train convert`: a configuration of upstream's verl becomes a recipe; standard error says what became of it.

Exit codes: 0 every key was converted; 2 the input cannot be read, or launches no trainer; 3 a recipe came out, and
something of the input is not in it or has to be done by hand. With `--strict`, 3 writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verl_contracts.errors import ConfigError
from verl_trainers.commands.arguments import FINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_trainers.commands.arguments import Subparsers

__all__ = ["PARTIAL", "add_parser", "run"]

PARTIAL = 3
"""Exit code of a conversion that left something out."""


def add_parser(commands: Subparsers) -> None:
    """Add `convert` to the commands of the parser."""
    command = commands.add_parser(
        "convert",
        help="turn a configuration of upstream's verl into a recipe",
        description="Turn a Hydra YAML file, a launch script or a launch line of upstream's verl into a recipe. "
        "The recipe goes to standard output and the report to standard error.",
        epilog="Exit codes: 0 every key was converted; 2 the input cannot be read; 3 something is not supported or has "
        "to be done by hand, and the recipe has the rest.",
    )
    _add_options(command)
    command.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="FILE|ARGS",
        help="a YAML file and overrides, a script and its arguments, or a launch line",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the recipe there")
    parser.add_argument("--strict", action="store_true", help="write nothing unless every key was converted")
    parser.add_argument("--keys", action="store_true", help="print every known key of verl and what becomes of it")


def run(options: argparse.Namespace) -> int:
    """Convert what `options` name, and return the exit code. Raises `ConfigError` for what cannot be read."""
    from verl_trainers.convert.inputs import read_input
    from verl_trainers.convert.render import render_keys, render_recipe, render_report
    from verl_trainers.convert.translate import convert

    late = argparse.ArgumentParser(prog="verl-train convert", allow_abbrev=False, add_help=False)
    _add_options(late)
    late.set_defaults(out=options.out, strict=options.strict, keys=options.keys)
    options, words = late.parse_known_args(options.words)  # options may also stand behind what is converted
    if options.keys:
        _say(render_keys(), sys.stdout)
        return FINE
    conversion = convert(read_input(words))
    if options.strict and not conversion.is_whole:
        _say(f"{render_report(conversion)}\n\nnothing was written (--strict)", sys.stderr)
        return PARTIAL
    recipe = render_recipe(conversion, name=_name(words))
    if options.out is None:
        _say(recipe.removesuffix("\n"), sys.stdout)
    else:
        _write(Path(options.out), recipe)
    _say(render_report(conversion), sys.stderr)
    return FINE if conversion.is_whole else PARTIAL


def _say(text: str, stream: TextIO) -> None:
    with suppress(BrokenPipeError):  # nobody reads any more, as behind `| head`; the exit code still counts
        print(text, file=stream, flush=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--out {path}: cannot be written: {exc.strerror}") from exc


def _name(words: Sequence[str]) -> str:
    return Path(words[0]).name if Path(words[0]).is_file() else "a launch line"
