"""`verl-train run`: a run from its recipe to its summary, and what is shown when it fails."""

# ruff: noqa: T201  a command prints
from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError, DataError, VerlError
from verl_trainers.commands.arguments import FAILED, FINE, add_recipe_arguments, out_folder, print_config, source_file
from verl_trainers.commands.interrupts import Interrupts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from pathlib import Path

    from verl_contracts.events import JsonValue
    from verl_trainers.commands.arguments import Subparsers
    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.run_folder import RunFolder

__all__ = ["add_parser", "run"]

MAX_LINES = 30
"""Most lines that a failed run prints."""


def add_parser(commands: Subparsers) -> None:
    """Add `run`."""
    parser = commands.add_parser("run", help="train", description="Train.")
    add_recipe_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace a previous run in the run folder")


def run(options: argparse.Namespace) -> int:
    """Train. Raises `ConfigError` and `DataError` for what cannot be run; nothing is left of it then."""
    if options.print_config:
        return print_config(options)
    source = source_file(options)
    out = out_folder(options, source)
    interrupts = Interrupts()

    from verl_trainers.config.load import resolve_config
    from verl_trainers.run_folder import RunFolder

    resolved = resolve_config(source, options.overrides, run_dir=str(out))
    folder = RunFolder.create(out, overwrite=options.overwrite)
    _log_to(folder.path / "run.log")
    try:
        summary = _train(resolved, folder, interrupts)
    except Exception as exc:
        interrupts.check()
        if isinstance(exc, (ConfigError, DataError)) and not folder.has_steps:
            folder.discard()
            raise
        folder.write_error("".join(traceback.format_exception(exc)))
        print("\n".join([*_failure_lines(exc), f"whole traceback: {out / 'error.txt'}"]), file=sys.stderr)
        return FAILED
    try:
        print(f"{_summary_line(summary)}\nrun folder: {out}", flush=True)
    except OSError:  # nobody reads any more; the run folder has it all
        sys.stdout = None
    return FINE


def _train(resolved: ResolvedConfig, folder: RunFolder, interrupts: Interrupts) -> Mapping[str, JsonValue]:
    from verl_trainers.run import run_training

    return run_training(resolved, folder, before_start=interrupts.hand_over)


def _failure_lines(exc: Exception) -> list[str]:
    """Return what to show of a failed run: the first cause, then what it led to, `MAX_LINES` at most."""
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
        return f"{_number(first)} → {_number(last)}"

    if summary["part"] == "val_only":
        return f"validated in {summary['wall_s']} s, nothing trained; held-out {_number(summary['val_last'])}"
    if summary["part"] == "rollout_only":
        saved = f"{summary['groups_saved']} groups saved in {summary['wall_s']} s, nothing trained"
        return f"{saved}; reward {pair('reward')}; train on them with data.rollout_files=[…/rollouts.jsonl]"
    if summary["part"] == "verify_only":
        worst = summary["logprob_diff_max"]
        return f"verified in {summary['wall_s']} s, nothing trained; log-probs differ by at most {worst:.2g} on average"
    once = summary["val_first"] == summary["val_last"]
    held_out = _number(summary["val_last"]) if once else pair("val")
    return f"{summary['steps']} steps in {summary['wall_s']} s; reward {pair('reward')}; held-out {held_out}"


def _number(value: JsonValue) -> str:
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def _log_to(file: Path) -> None:
    """Send our own messages to the terminal, warnings of all, and everything to a file."""
    terminal = logging.StreamHandler(sys.stderr)
    terminal.addFilter(lambda row: row.levelno >= logging.WARNING or row.name.startswith("verl_"))
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handlers = (terminal, logging.FileHandler(file, encoding="utf-8", errors="backslashreplace"))
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
