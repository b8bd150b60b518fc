"""From a file and overrides to a checked run. Nothing is started, and every mistake is shown at once.

`load_config` reads; `check_config` checks what was read, or what was built in Python; `resolve_config` does both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import families
from verl_contracts.training import ScheduleRequest
from verl_trainers.config.build import build_run_config
from verl_trainers.config.check import check_files, check_relations
from verl_trainers.config.mistakes import Mistake, config_error
from verl_trainers.config.placing import check_replicas, check_resources, check_servers, whole_replicas
from verl_trainers.config.plugins import load_plugins, usable
from verl_trainers.config.prepare import load_prepare
from verl_trainers.config.sources import read_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from verl_contracts.training import ModePlan, TrainerMode
    from verl_trainers.config.plugins import RunPlugins
    from verl_trainers.config.schema import RunConfig

__all__ = ["Examined", "ResolvedConfig", "check_config", "examine", "load_config", "resolve_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration that was checked, with what follows from it."""

    config: RunConfig
    plugins: RunPlugins
    plan: ModePlan
    """What the trainer mode made of it."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Full key → ``file:line`` or the override that set it; empty for a config built in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A configuration that was read and checked, whatever came out."""

    config: RunConfig
    """With defaults where a value could not be used."""
    plugins: RunPlugins | None
    """None when one of them cannot be used."""
    plan: ModePlan | None
    """None when the mode cannot be used, or refuses."""
    mistakes: tuple[Mistake, ...]
    broken: frozenset[str]
    """Keys that hold their default because their value could not be used."""
    places: Mapping[str, str]
    place: Callable[[str], str]
    """Says who set a key."""

    @property
    def resolved(self) -> ResolvedConfig | None:
        """The configuration that a run may use; None when there is a mistake."""
        if self.plugins is None or self.plan is None or self.mistakes:
            return None
        return ResolvedConfig(config=self.config, plugins=self.plugins, plan=self.plan, places=self.places)


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
    plugins, plan, mistakes = _check(config, run_dir)
    if plugins is None or plan is None or mistakes:
        raise config_error(mistakes)
    return ResolvedConfig(config=config, plugins=plugins, plan=plan)


def resolve_config(source: Path | None, overrides: Sequence[str] = (), *, run_dir: str = "") -> ResolvedConfig:
    """Read and check. Raises `ConfigError` with every mistake of both."""
    found = examine(source, overrides, run_dir=run_dir)
    resolved = found.resolved
    if resolved is None:
        raise config_error(found.mistakes)
    return resolved


def examine(source: Path | None, overrides: Sequence[str] = (), *, run_dir: str = "") -> Examined:
    """Read and check, and return what was found, mistakes included.

    Raises `ConfigError` only for what cannot be read at all.
    """
    sources = read_sources(source, overrides, run_dir=run_dir)
    config, mistakes = build_run_config(sources)
    broken = frozenset(mistake.key for mistake in mistakes)
    plugins, plan, found = _check(config, run_dir)
    mistakes += [
        mistake if mistake.place else replace(mistake, place=sources.place(mistake.key))
        for mistake in found
        if not mistake.follows_from(broken)
    ]
    return Examined(
        config=config,
        plugins=plugins,
        plan=plan,
        mistakes=tuple(mistakes),
        broken=broken,
        places=sources.places,
        place=sources.place,
    )


def _check(config: RunConfig, run_dir: str) -> tuple[RunPlugins | None, ModePlan | None, list[Mistake]]:
    """Return plug-ins and plan, each None when it cannot be had, and every mistake."""
    servers_named = config.actor_rollout_ref.rollout.llm_server_manager_class
    plugins, bad_plugins = load_plugins(config)
    mistakes = [*check_relations(config), *check_files(config, prepared=Path(run_dir) / "prepared"), *bad_plugins]
    if config.prepare is not None:
        try:
            load_prepare(config.prepare)
        except ConfigError as exc:
            mistakes.append(Mistake.parse(str(exc)))
    mode = plugins.mode if plugins else usable(families.TRAINER_MODE, config.trainer.mode)
    if mode is None:
        return None, None, mistakes
    try:
        plan = _plan(config, mode)
    except ConfigError as exc:
        return None, None, [*mistakes, *(Mistake.parse(line) for line in str(exc).splitlines())]
    servers = plugins.llm_server_manager if plugins else usable(families.LLM_SERVER_MANAGER, servers_named)
    later = [*check_resources(config, plan.placement), *check_replicas(config, plan.placement)]
    if servers is not None:
        later += check_servers(config, plan.placement, servers)
    known = {mistake.key for mistake in mistakes}
    return plugins, plan, [*mistakes, *(mistake for mistake in later if not mistake.follows_from(known))]


def _plan(config: RunConfig, mode: type[TrainerMode]) -> ModePlan:
    rollout, schedule = config.actor_rollout_ref.rollout, config.async_training
    plan = mode().plan(
        trainer_devices=config.trainer.n_gpus_per_node,
        rollout_devices=rollout.n_gpus_per_node,
        request=ScheduleRequest(
            max_staleness=schedule.max_staleness,
            sync_every=schedule.sync_every,
            pause_mode=schedule.pause_mode,
            sleep_while_training=rollout.free_cache_engine,
        ),
    )
    return replace(plan, placement=whole_replicas(config, plan.placement))
