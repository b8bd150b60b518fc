"""The configuration that a run would use, one key a line, each with where its value came from.

It can be read back: what was derived stands as a value, so a run from it does the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import yaml

from verl_trainers.config.dump import plain_value
from verl_trainers.config.engine import logprob_diff_limit
from verl_trainers.config.placing import max_model_len
from verl_trainers.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from verl_trainers.config.load import ResolvedConfig

__all__ = ["derived_values", "render_with_sources"]

_COLUMN = 72
"""Where the comments begin, unless a line is longer."""


def render_with_sources(resolved: ResolvedConfig, *, run_dir: str = "") -> str:
    """Return YAML with a comment on each line: default, ``file:line``, override, or derived from what.

    Where a value names `run_dir`, the YAML has ``${run_dir}``, so that it can be run in another folder.
    """
    lines = _lines(resolved.config, RunConfig(), "", resolved.places, derived_values(resolved), run_dir)
    return "".join(f"{line:{_COLUMN}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines)


def derived_values(resolved: ResolvedConfig) -> Mapping[str, tuple[object, str]]:
    """Return full key → value and reason, for each key that is null and does not mean nothing."""
    config, schedule = resolved.config, resolved.plan.schedule
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode = f"trainer.mode={config.trainer.mode}"
    lengths = "data.max_prompt_length + data.max_response_length"
    derived: dict[str, tuple[object, object, str]] = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": (
            actor.ppo_mini_batch_size,
            config.data.train_batch_size,
            "data.train_batch_size",
        ),
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": (
            config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu,
            actor.ppo_max_token_len_per_gpu,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        ),
        "actor_rollout_ref.rollout.max_model_len": (rollout.max_model_len, max_model_len(config), lengths),
        "actor_rollout_ref.rollout.n_gpus_per_node": (
            rollout.n_gpus_per_node,
            resolved.plan.placement.standalone_devices,
            mode,
        ),
        "actor_rollout_ref.rollout.free_cache_engine": (
            rollout.free_cache_engine,
            schedule.sleep_while_training,
            mode,
        ),
        "actor_rollout_ref.rollout.logprob_diff_limit": (
            rollout.logprob_diff_limit,
            logprob_diff_limit(config),
            "actor_rollout_ref.rollout.dtype and actor_rollout_ref.actor.fsdp_config.model_dtype",
        ),
        "async_training.max_staleness": (config.async_training.max_staleness, schedule.max_staleness, mode),
        "async_training.sync_every": (config.async_training.sync_every, schedule.sync_every, mode),
        "async_training.pause_mode": (config.async_training.pause_mode, schedule.pause_mode, mode),
    }
    return {key: (value, f"derived from {reason}") for key, (told, value, reason) in derived.items() if told is None}


def _lines(
    section: object,
    default: object,
    prefix: str,
    places: Mapping[str, str],
    derived: Mapping[str, tuple[object, str]],
    run_dir: str,
) -> Iterator[tuple[str, str]]:
    """Yield each line and the comment on it, which is empty for the head of a section."""
    indent = "  " * prefix.count(".")
    for field in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
        key, value, usual = f"{prefix}{field.name}", getattr(section, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:", ""
            yield from _lines(value, usual, f"{key}.", places, derived, run_dir)
            continue
        origin = _origin(key, places, changed=value != usual)
        if key in derived:
            value, origin = derived[key]
        yield f"{indent}{field.name}: {_inline(value, run_dir)}", origin


def _origin(key: str, places: Mapping[str, str], *, changed: bool) -> str:
    """Say who set `key`: those that set it or an option in it; or who set a section around it as a whole."""
    own = [place for name, place in places.items() if name == key or name.startswith(f"{key}.")]
    if own:
        return ", ".join(dict.fromkeys(own))
    while changed and "." in key:
        key = key.rpartition(".")[0]
        if key in places:
            return places[key]
    return "default"


def _movable(value: object, run_dir: str) -> object:
    """Return a plain `value` with ``${run_dir}`` for the folder."""
    if isinstance(value, dict):
        return {key: _movable(item, run_dir) for key, item in value.items()}
    if isinstance(value, list):
        return [_movable(item, run_dir) for item in value]
    return value.replace(run_dir, "${run_dir}") if run_dir and isinstance(value, str) else value


def _inline(value: object, run_dir: str) -> str:
    """Return `value` as YAML on one line."""
    plain = _movable(plain_value(value), run_dir)
    text: str = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").strip()
