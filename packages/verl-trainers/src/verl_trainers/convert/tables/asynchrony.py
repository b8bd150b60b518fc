"""When weights move and how old samples may be: `trainer.v1.*`, `async_training.*` and `rollout.*` at the root.

Upstream counts versions by weight sync, and we by step: version v is the policy after step v. So a bound of theirs is
converted together with the number of steps between syncs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl_trainers.convert.rows import (
    COST,
    Fate,
    When,
    computed,
    fixed,
    keep,
    mapped,
    moved,
    refuse,
    under,
)
from verl_trainers.convert.settings import offered
from verl_trainers.convert.tables.data import step_groups
from verl_trainers.convert.tables.rollout import own_devices, own_nodes

if TYPE_CHECKING:
    from verl_trainers.convert.settings import Settings

__all__ = ["ASYNCHRONY", "mode_of"]

_STALENESS, _SYNC = "async_training.max_staleness", "async_training.sync_every"
_V1 = "trainer.v1"
LENDING = "async_training.use_dynamic_resource_scheduling"
SWITCHING = When(f"{_V1}.separate_async.hybrid_rollout.enable_switch")
NEAREST: dict[str, dict[str, object]] = {
    "one_step_off": {"trainer.mode": "fully_async", _STALENESS: 1, _SYNC: 1},
    "separate_async": {"trainer.mode": "fully_async"},
    "colocate_async": {"trainer.mode": "sync"},
}
"""What comes nearest to a mode that is not installed."""


def mode_of(settings: Settings) -> Fate:
    """Return what becomes of the mode that upstream would run in."""
    if settings.mode in offered("verl_contracts.trainer_modes", "sync"):
        return mapped({"trainer.mode": settings.mode}, "the mode that is launched")
    values = NEAREST.get(settings.mode, {"trainer.mode": "sync"})
    near = ", ".join(f"{key}={value}" for key, value in values.items())
    return refuse(f"the mode {settings.mode} is not built", near=near, values=values)


def v1_mode(value: object, settings: Settings) -> Fate:
    """Translate the mode when it is a key."""
    return mode_of(settings) if value == settings.mode else keep(f"no effect: {settings.mode} is launched")


def span(value: object, settings: Settings) -> Fate:
    """Translate upstream's span of versions, in which a sample of the current version counts 1."""
    if settings.mode == "sync":
        return keep("nothing is stale in mode sync")
    if value is None:
        return refuse("staleness is always bounded", near=_STALENESS)
    if settings.mode == "colocate_async" and "colocate_async" not in offered("verl_contracts.trainer_modes", "sync"):
        return refuse("the mode colocate_async is not built", near="trainer.mode=fully_async")
    if not isinstance(value, int):
        return refuse("must be a whole number")
    return mapped({_STALENESS: value - 1}, f"a span of {value} versions, the current one included")


def cycle(value: object, settings: Settings) -> Fate:
    """Check that a step is what lies between two syncs, as upstream demands."""
    if settings.mode != "separate_async":
        return keep("no effect: another mode is launched")
    return mapped({_SYNC: 1}, "a step is all of what is trained between two syncs: data.train_batch_size groups")


def staleness(value: object, settings: Settings) -> Fate:
    """Translate the share of samples that may be left over from before a sync.

    Upstream starts (1 + share) * sync_every batches for each version. The last of them is trained that many steps after
    the version was made, so that its staleness is one less.
    """
    if settings.mode != "fully_async":
        return keep("no effect: another mode is launched")
    every = settings.number("async_training.trigger_parameter_sync_step", 4)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
        return refuse("must be a number ≥ 0", near=_STALENESS)
    bound = every - 1 + math.ceil(value * every - 1e-9)
    why = f"{every} steps between syncs - 1, and {value} * {every} batches left over, rounded up"
    return mapped({_STALENESS: bound}, why)


def sync_every(value: object, settings: Settings) -> Fate:
    """Translate the number of local updates between syncs."""
    if settings.mode != "fully_async":
        return keep("no effect: another mode is launched")
    return mapped({_SYNC: value}, "another name; a step is async_training.require_batches mini-batches")


def require_batches(value: object, settings: Settings) -> Fate:
    """Translate the mini-batches in one fetch."""
    if settings.mode != "fully_async":
        return keep("no effect: another mode is launched")
    return mapped({"data.train_batch_size": step_groups(settings)}, "groups in a step = mini-batches * their size")


def late(value: object, settings: Settings) -> Fate:
    """Translate what happens to a group that is too old."""
    if settings.mode == "sync" or value == "wait":
        return keep("a group that is due is waited for")
    return refuse("a group that is due is waited for, and never dropped", near="wait")


ASYNCHRONY = (
    *under(
        _V1,
        (
            computed("trainer_mode", v1_mode, "trainer.mode", why="the mode"),
            fixed("colocate_async.num_warmup_batches", "admission fills the pipeline up to the bound", any_value=True),
            fixed("separate_async.num_warmup_batches", "admission fills the pipeline up to the bound", any_value=True),
            computed("separate_async.parameter_sync_step", cycle, _SYNC, why="a step is what lies between two syncs"),
            fixed("separate_async.hybrid_rollout.**", "training devices are not lent", when=SWITCHING, loses=COST),
            fixed("sync", "has no options", any_value=True),
            computed("sampler.max_off_policy_threshold", span, _STALENESS, why="the current version counts 1 upstream"),
            computed("sampler.max_off_policy_strategy", late, why="a group that is due is waited for"),
            fixed("sampler.sync_refill_failed_groups", "reward.unusable decides, refill by default", any_value=True),
            fixed("sampler.custom_sampler.name", "admission is one object", any_value=True),
            fixed("sampler.**", "admission is one object"),
        ),
    ),
    *under(
        "async_training",
        (
            computed("staleness_threshold", staleness, _STALENESS, why="in steps instead of a share", default=0.1),
            computed("trigger_parameter_sync_step", sync_every, _SYNC, why="steps between syncs", default=4),
            computed(
                "require_batches", require_batches, "data.train_batch_size", why="mini-batches in a step", default=1
            ),
            moved("partial_rollout", "actor_rollout_ref.rollout.partial_rollout", why="another place"),
            fixed("use_trainer_do_validate", "replicas validate", loses=COST),
            fixed("use_rollout_log_probs", "actor.old_log_prob decides", any_value=True),
            fixed("compute_prox_log_prob", "actor.old_log_prob decides", near="actor_rollout_ref.actor.old_log_prob"),
            fixed(
                "concurrent_samples_per_replica",
                "replicas take what they have room for",
                ok=(16,),
                near="max_num_seqs",
                loses=COST,
            ),
            fixed("use_dynamic_resource_scheduling", "training devices are not lent", loses=COST),
            fixed("dynamic_schedule_*", "training devices are not lent", when=When(LENDING), loses=COST),
        ),
    ),
    computed("rollout.nnodes", own_nodes, "actor_rollout_ref.rollout.n_gpus_per_node", why="one number for all nodes"),
    computed(
        "rollout.n_gpus_per_node",
        own_devices,
        "actor_rollout_ref.rollout.n_gpus_per_node",
        why="one number for all nodes",
    ),
    fixed("rollout.n", "actor_rollout_ref.rollout.n counts", any_value=True),
)
