"""The command `verl-train`: picks one of `commands`, and gives the process its exit code.

Exit codes: 0 finished; 1 the run failed, with the first cause first, or something must be fixed; 2 the configuration or
the data cannot be used, one line per mistake; 3 a conversion left something out; 130 interrupted. Nothing heavy is
imported before the arguments are known to be right.
"""

# ruff: noqa: T201  a command prints
from __future__ import annotations

import argparse
import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from verl_contracts.errors import ConfigError, DataError
from verl_trainers import __version__
from verl_trainers.commands import check, doctor, plugins, recipes, run
from verl_trainers.commands.arguments import FAILED, INTERRUPTED, REFUSED
from verl_trainers.commands.interrupts import ignore_interrupts
from verl_trainers.convert import command as convert

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_trainers.commands.arguments import Subparsers

__all__ = ["command", "main"]


class Command(Protocol):
    """What a module of `commands` offers."""

    def add_parser(self, commands: Subparsers, /) -> None:
        """Say what it takes. Called for every command, so it must be quick."""
        ...

    def run(self, options: argparse.Namespace, /) -> int:
        """Do it and return the exit code. `ConfigError` and `DataError` become lines and exit code 2."""
        ...


COMMANDS: Mapping[str, Command] = {
    "run": run,
    "check": check,
    "recipes": recipes,
    "plugins": plugins,
    "convert": convert,
    "doctor": doctor,
}


class _Exit:
    """Ends the process without taking the interpreter apart.

    A thread of torch that comes to its end meanwhile, and needs the interpreter for that, would abort the process: a
    run that finished would exit with 134.
    """

    def __init__(self) -> None:
        self.code = FAILED
        atexit.register(self._leave)  # the first to be registered is the last to be called

    def _leave(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
                stream.flush()
        os._exit(self.code)


def command() -> NoReturn:
    """Be the whole process: run the command, then leave with its exit code."""
    leaving = _Exit()
    try:
        leaving.code = main()
    except SystemExit as exc:  # the parser's
        leaving.code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else FAILED
        raise
    raise SystemExit(leaving.code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    sys.path.append(str(Path.cwd()))  # so that a class path may name a module of the current folder
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # inherited by every process of the run
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return COMMANDS[options.command].run(options)
    except (ConfigError, DataError) as exc:
        print("\n".join(_error_lines(str(exc))), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        ignore_interrupts()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _error_lines(message: str) -> list[str]:
    """Return a line for each mistake; what is indented belongs to the mistake above it."""
    return [line if line.startswith(" ") else f"error: {line}" for line in message.splitlines()] or ["error: "]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand before, between and after options."""
    parser = argparse.ArgumentParser(prog="verl-train", description="RL post-training of language models.")
    parser.add_argument("--version", action="version", version=f"verl-train {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS.values():
        module.add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if word.startswith("-")]
    if wrong or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if rest:
        options.overrides += rest
    return options


if __name__ == "__main__":
    command()
