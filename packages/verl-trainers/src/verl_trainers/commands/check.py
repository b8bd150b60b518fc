"""`verl-train check`: everything that can be known to be wrong before anything is started."""

# ruff: noqa: T201  a command prints
from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.commands.arguments import FINE, add_recipe_arguments, out_folder, source_file

if TYPE_CHECKING:
    import argparse

    from verl_trainers.commands.arguments import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(commands: Subparsers) -> None:
    """Add `check`."""
    text = "check everything that can be checked, and start nothing"
    parser = commands.add_parser("check", help=text, description=f"{text.capitalize()}.")
    add_recipe_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Check. Raises `ConfigError` and `DataError` with a line per mistake."""
    source = source_file(options)

    from verl_trainers.config.load import resolve_config
    from verl_trainers.run import open_run

    resolved = resolve_config(source, options.overrides, run_dir=str(out_folder(options, source)))
    config, plan = resolved.config, resolved.plan
    if config.prepare is None:
        print(open_run(resolved).steps.message)
    else:
        print(f"data and models are made at the start by {config.prepare}, and checked then")
    print(f"mode {config.trainer.mode} on runtime {config.runtime}: {plan.placement}; {plan.schedule}")
    for name in resolved.plugins.__slots__:
        print(f"  {name:20} {_class_path(getattr(resolved.plugins, name))}")
    print("everything fits; nothing was started")
    return FINE


def _class_path(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_class_path(item) for item in value)
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else "none"
