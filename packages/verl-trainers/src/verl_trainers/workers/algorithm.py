"""From config to the two algorithm plug-ins of a step: the advantage estimator and the policy loss.

Owns which keys reach their constructors. Keys of the schema that only some algorithms know are passed to those that
take them; set to something else than its default for one that does not, a key is refused instead of ignored.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_plugin, families, load_plugin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.training import AdvantageEstimator, PolicyLoss
    from verl_trainers.config.schema import ActorConfig, AlgorithmConfig

__all__ = ["build_estimator", "build_policy_loss"]

P = TypeVar("P")


def build_estimator(config: AlgorithmConfig) -> AdvantageEstimator:
    """Return the estimator that `config` names. Raises `PluginError` and `ConfigError`."""
    key = "algorithm.adv_estimator"
    cls = load_plugin(families.ADVANTAGE_ESTIMATOR, config.adv_estimator, key=key)
    known = {"norm_by_std": ("algorithm.norm_adv_by_std_in_grpo", config.norm_adv_by_std_in_grpo, True)}
    return _construct(cls, known, config.options, key="algorithm.options")


def build_policy_loss(config: ActorConfig) -> PolicyLoss:
    """Return the policy loss that `config` names. Raises `PluginError` and `ConfigError`."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    cls = load_plugin(families.POLICY_LOSS, config.policy_loss.loss_mode, key=key)
    actor = "actor_rollout_ref.actor"
    known: dict[str, tuple[str, object, object]] = {
        "clip_ratio_low": (f"{actor}.clip_ratio_low", config.clip_ratio_low, 0.2),
        "clip_ratio_high": (f"{actor}.clip_ratio_high", config.clip_ratio_high, 0.2),
        "aggregation": (f"{actor}.loss_agg_mode", config.loss_agg_mode, "token-mean"),
    }
    return _construct(cls, known, config.policy_loss.options, key=f"{actor}.policy_loss.options")


def _construct(
    cls: type[P], known: Mapping[str, tuple[str, object, object]], options: Mapping[str, object], *, key: str
) -> P:
    """Call `cls` with `options`, and with those of `known` (keyword → config key, value, default) that it takes."""
    parameters = inspect.signature(cls).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    arguments = dict(options)
    for keyword, (path, value, default) in known.items():
        if keyword in options:
            raise ConfigError(f"{key}.{keyword} says again what {path} says; set {path} only")
        if keyword in parameters or takes_all:
            arguments[keyword] = value
        elif value != default:
            raise ConfigError(
                f"{path} = {value!r} has no effect: {cls.__qualname__} takes no {keyword!r}; set it to its "
                f"default, {default!r}"
            )
    return build_plugin(cls, arguments, key=key)
