"""From a file and overrides to a checked run. Nothing is started, and every mistake is shown at once.

`load_config` reads; `check_config` checks what was read, or what was built in Python; `resolve_config` does both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.training import ScheduleRequest
from verl_trainers.config.build import build_run_config
from verl_trainers.config.check import check_files, check_relations
from verl_trainers.config.mistakes import Mistake, config_error
from verl_trainers.config.placing import check_replicas, check_resources, check_servers
from verl_trainers.config.plugins import load_plugins
from verl_trainers.config.prepare import load_prepare
from verl_trainers.config.sources import read_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.training import ModePlan
    from verl_trainers.config.plugins import RunPlugins
    from verl_trainers.config.schema import RunConfig

__all__ = ["ResolvedConfig", "check_config", "load_config", "resolve_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration that was checked, with what follows from it."""

    config: RunConfig
    plugins: RunPlugins
    plan: ModePlan
    """What the trainer mode made of it."""


def load_config(source: Path | None, overrides: Sequence[str] = (), *, run_dir: str = "") -> RunConfig:
    """Read a YAML file, put ``a.b=c`` overrides on top, and build the config.

    `source` of None means overrides only; `run_dir` is the value of ``${run_dir}``. Raises `ConfigError` with one line
    per mistake: unknown keys with the nearest one, wrong types, null where a value is needed.
    """
    config, mistakes = build_run_config(read_sources(source, overrides, run_dir=run_dir))
    if mistakes:
        raise config_error(mistakes)
    return config


def check_config(config: RunConfig, *, run_dir: str = "") -> ResolvedConfig:
    """Check the rules between keys, the files, every plug-in, the mode and the resources. Raises `ConfigError`.

    Files in the folder that `prepare` fills, ``prepared`` in `run_dir`, need not be there yet.
    """
    resolved, mistakes = _check(config, run_dir)
    if resolved is None or mistakes:
        raise config_error(mistakes)
    return resolved


def resolve_config(source: Path | None, overrides: Sequence[str] = (), *, run_dir: str = "") -> ResolvedConfig:
    """Read and check. Raises `ConfigError` with every mistake of both."""
    sources = read_sources(source, overrides, run_dir=run_dir)
    config, mistakes = build_run_config(sources)
    broken = {mistake.key for mistake in mistakes}
    resolved, found = _check(config, run_dir)
    mistakes += [
        mistake if mistake.place else replace(mistake, place=sources.place(mistake.key))
        for mistake in found
        if not broken & {mistake.key, *mistake.uses}
    ]
    if resolved is None or mistakes:
        raise config_error(mistakes)
    return resolved


def _check(config: RunConfig, run_dir: str) -> tuple[ResolvedConfig | None, list[Mistake]]:
    plugins, bad_plugins = load_plugins(config)
    mistakes = [*check_relations(config), *check_files(config, prepared=Path(run_dir) / "prepared"), *bad_plugins]
    if config.prepare is not None:
        try:
            load_prepare(config.prepare)
        except ConfigError as exc:
            mistakes.append(Mistake(key="", text=str(exc)))
    if plugins is None:
        return None, mistakes
    try:
        plan = _plan(config, plugins)
    except ConfigError as exc:
        return None, [*mistakes, *(Mistake(key="", text=line) for line in str(exc).splitlines())]
    mistakes += [
        *check_resources(config, plan.placement),
        *check_replicas(config, plan.placement),
        *check_servers(config, plan.placement, plugins.llm_server_manager),
    ]
    return ResolvedConfig(config=config, plugins=plugins, plan=plan), mistakes


def _plan(config: RunConfig, plugins: RunPlugins) -> ModePlan:
    rollout, schedule = config.actor_rollout_ref.rollout, config.async_training
    return plugins.mode().plan(
        trainer_devices=config.trainer.n_gpus_per_node,
        rollout_devices=rollout.n_gpus_per_node,
        request=ScheduleRequest(
            max_staleness=schedule.max_staleness,
            sync_every=schedule.sync_every,
            pause_mode=schedule.pause_mode,
            sleep_while_training=rollout.free_cache_engine,
        ),
    )
