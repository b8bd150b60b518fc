"""Everything that can be known to be wrong before anything is started, found at once.

Owns which findings depend on which: what follows from a broken key is not reported beside it. Starts no runtime, no
replica and no worker; the reward function alone is loaded, in a process that is gone afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from verl_trainers.config.check import check_files
from verl_trainers.config.load import examine
from verl_trainers.config.placing import fit_devices
from verl_trainers.preflight.data import read_inputs
from verl_trainers.preflight.devices import judge_memory
from verl_trainers.preflight.memory import estimate_memory
from verl_trainers.preflight.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from verl_contracts.training import ModePlan
    from verl_trainers.config.load import ResolvedConfig
    from verl_trainers.config.mistakes import Mistake
    from verl_trainers.config.plugins import RunPlugins
    from verl_trainers.config.schema import RunConfig

__all__ = ["preflight", "preflight_file"]

_INPUT_SECTIONS = ("data", "actor_rollout_ref.model")
"""Sections without which data and model cannot be read as meant."""


def preflight(resolved: ResolvedConfig) -> Report:
    """Check what a resolved configuration names: data, tokenizer, model, lengths, memory.

    Data and models that `prepare` is yet to make are passed over.
    """
    report = _inspect(resolved.config, resolved.plan, ())
    return replace(report, lines=(*report.lines, *_plugin_lines(resolved.plugins)), resolved=resolved)


def preflight_file(source: Path | None, overrides: Sequence[str] = (), *, run_dir: str = "") -> Report:
    """Read a file and overrides, and check all of it: what `resolve_config` refuses, and what `preflight` finds.

    Raises `ConfigError` only for what cannot be read at all, a file that is not YAML for example.
    """
    found = examine(source, overrides, run_dir=run_dir)
    if any(key.startswith(_INPUT_SECTIONS) for key in found.broken):
        report = Report(mistakes=found.mistakes)
    else:
        report = _inspect(found.config, found.plan, found.mistakes, place=found.place)
    lines = (*report.lines, *_plugin_lines(found.plugins))
    return replace(report, lines=lines, resolved=None if report.mistakes else found.resolved)


def _inspect(
    config: RunConfig, plan: ModePlan | None, known: Sequence[Mistake], *, place: Callable[[str], str] = lambda key: ""
) -> Report:
    """Look at data and model of `config` as well; `known` is what is wrong already, and `place` says who set a key."""
    broken = {mistake.key for mistake in known}
    inputs = read_inputs(config, plan)
    found, lines, warnings = list(inputs.mistakes), list(inputs.lines), list(inputs.warnings)
    if config.prepare is not None and check_files(config):
        lines.append(f"data and models are made at the start by {config.prepare}, and checked then")
    if plan is not None:
        lines.append(f"mode {config.trainer.mode} on runtime {config.runtime}: {plan.placement}; {plan.schedule}")
        fit = fit_devices(config, plan.placement)
        lines.append(str(fit) if fit is not None else "devices: those of the cluster, which refuses what is not free")
        if inputs.model is not None:
            verdict = judge_memory(config, plan, estimate_memory(config, plan, inputs.model))
            lines += verdict.lines
            warnings += verdict.warnings
            found += verdict.mistakes
    placed = (replace(m, place=place(m.key)) for m in found if not m.follows_from(broken))
    return Report(mistakes=(*known, *placed), warnings=tuple(warnings), lines=tuple(lines), inputs=inputs)


def _plugin_lines(plugins: RunPlugins | None) -> list[str]:
    if plugins is None:
        return []
    return [f"  {name:20} {_class_path(getattr(plugins, name))}" for name in plugins.__slots__]


def _class_path(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_class_path(item) for item in value)
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else "none"
