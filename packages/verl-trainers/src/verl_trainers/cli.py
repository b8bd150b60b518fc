"""The command `verl-train`: run a recipe, or check it and start nothing.

Exit codes: 0 finished; 1 the run failed, with the first cause first; 2 the configuration or the data cannot be used,
one line per mistake; 130 interrupted. Nothing heavy is imported before the arguments are known to be right.
"""

# ruff: noqa: T201  a command prints
from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from verl_trainers import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from verl_contracts.events import JsonValue
    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.run_folder import RunFolder

__all__ = ["command", "main"]

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
MAX_LINES = 30
RECIPES = Path(__file__).parent / "recipes"


class Interrupts:
    """Remembers that the user asked to stop.

    A `KeyboardInterrupt` that is raised inside an import or a destructor can be swallowed there, or come out as another
    error; so starting looks here as well.
    """

    def __init__(self) -> None:
        """Listen for SIGTERM, and for SIGINT unless it is ignored, as it is in a shell's background jobs."""
        self.asked = False
        self._heeds = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        signal.signal(signal.SIGTERM, self._stop)
        if self._heeds:
            signal.signal(signal.SIGINT, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the user asked to stop."""
        if self.asked:
            raise KeyboardInterrupt

    def hand_over(self) -> None:
        """Leave interrupts to the event loop that is about to run, which cancels its main task."""
        self.check()
        if self._heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


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
    if options.command == "recipes":
        return _recipes()
    if options.command == "plugins":
        return _plugins()
    source = _source(options.recipe)
    if source is None:
        print(f"no recipe or file {options.recipe!r}; recipes: {', '.join(_names())}", file=sys.stderr)
        return REFUSED
    out = Path(options.out or f"runs/{source.stem}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if options.command == "check":
        return _refusing(lambda: _check(source, options.overrides, out))
    interrupts = Interrupts()
    return _refusing(lambda: _run(source, options.overrides, out, overwrite=options.overwrite, interrupts=interrupts))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand before, between and after options."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if word.startswith("-")]
    if wrong or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(wrong or rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-train", description="RL post-training of language models.")
    parser.add_argument("--version", action="version", version=f"verl-train {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("run", "train"), ("check", "check everything that can be checked, and start nothing")):
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
        command.add_argument("recipe", metavar="RECIPE|FILE", help="name of a shipped recipe, or a YAML file")
        command.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the recipe")
        command.add_argument("--out", metavar="DIR", help="run folder (default: runs/RECIPE-TIME)")
        if name == "run":
            command.add_argument("--overwrite", action="store_true", help="replace a previous run in the run folder")
    commands.add_parser("recipes", help="list the shipped recipes")
    commands.add_parser("plugins", help="list the installed plug-ins")
    return parser


def _names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _source(recipe: str) -> Path | None:
    for path in (RECIPES / f"{recipe}.yaml", Path(recipe)):
        if path.is_file():
            return path
    return None


def _recipes() -> int:
    for name in _names():
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:20} {first.lstrip('# ')}")
    return 0


def _plugins() -> int:
    from verl_contracts.plugins import FAMILIES, available

    for family in FAMILIES.values():
        print(family.name)
        for name, entries in available(family).items():
            for entry in entries:
                print(f"  {name:16} {entry.value}")
    return 0


def _refusing(action: Callable[[], int]) -> int:
    """Run `action`, and turn what is wrong with configuration or data into lines and an exit code."""
    from verl_contracts.errors import ConfigError, DataError

    try:
        return action()
    except (ConfigError, DataError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # everything is stopped; asking again must not break the exit
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _check(source: Path, overrides: Sequence[str], out: Path) -> int:
    from verl_trainers.config.load import resolve_config
    from verl_trainers.run import open_data

    resolved = resolve_config(source, overrides, run_dir=str(out))
    config, plan = resolved.config, resolved.plan
    if config.prepare is None:
        print(open_data(config).steps.message)
    else:
        print(f"data and models are made at the start by {config.prepare}, and checked then")
    print(f"mode {config.trainer.mode} on runtime {config.runtime}: {plan.placement}; {plan.schedule}")
    for name in resolved.plugins.__slots__:
        print(f"  {name:20} {_class_path(getattr(resolved.plugins, name))}")
    print("everything fits; nothing was started")
    return 0


def _class_path(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_class_path(item) for item in value)
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else "none"


def _run(source: Path, overrides: Sequence[str], out: Path, *, overwrite: bool, interrupts: Interrupts) -> int:
    from verl_trainers.config.load import resolve_config
    from verl_trainers.run_folder import RunFolder

    resolved = resolve_config(source, overrides, run_dir=str(out))
    folder = RunFolder.create(out, overwrite=overwrite)
    _log_to(folder.path / "run.log")
    try:
        summary = _train(resolved, folder, interrupts)
    except Exception as exc:
        interrupts.check()
        if _is_refusal(exc):
            folder.discard()
            raise
        folder.write_error("".join(traceback.format_exception(exc)))
        print("\n".join([*_failure_lines(exc), f"whole traceback: {out / 'error.txt'}"]), file=sys.stderr)
        return FAILED
    try:
        print(f"{_summary_line(summary)}\nrun folder: {out}", flush=True)
    except OSError:  # nobody reads any more; the run folder has it all
        sys.stdout = None
    return 0


def _train(resolved: ResolvedConfig, folder: RunFolder, interrupts: Interrupts) -> Mapping[str, JsonValue]:
    from verl_trainers.run import run_training

    return run_training(resolved, folder, before_start=interrupts.hand_over)


def _is_refusal(exc: Exception) -> bool:
    from verl_contracts.errors import ConfigError, DataError

    return isinstance(exc, (ConfigError, DataError))


def _failure_lines(exc: Exception) -> list[str]:
    """Return what to show of a failed run: the first cause, then what it led to, `MAX_LINES` at most."""
    from verl_contracts.errors import VerlError
    from verl_contracts.failures import FailureRecord

    record = FailureRecord.from_exception(exc, role="driver", rank=0)
    message = str(exc).splitlines() or [""]
    lines = [f"the run failed: {record.cause.partition(chr(10))[0]}"]
    if not record.cause.endswith(str(exc)):
        lines.append(f"  led to {type(exc).__name__}: {message[0]}")
    lines += [f"  {line}" for line in (message[1:] if isinstance(exc, VerlError) else record.lines)]
    return lines[: MAX_LINES - 1]


def _summary_line(summary: Mapping[str, JsonValue]) -> str:
    def pair(name: str) -> str:
        first, last = summary.get(f"{name}_first"), summary.get(f"{name}_last")
        return " → ".join(f"{value:.3f}" if isinstance(value, (int, float)) else "-" for value in (first, last))

    return f"{summary['steps']} steps in {summary['wall_s']} s; reward {pair('reward')}; held-out {pair('val')}"


def _log_to(file: Path) -> None:
    """Send our own messages to the terminal, warnings of all, and everything to a file."""
    terminal = logging.StreamHandler(sys.stderr)
    terminal.addFilter(lambda row: row.levelno >= logging.WARNING or row.name.startswith("verl_"))
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handlers = (terminal, logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


if __name__ == "__main__":
    command()
