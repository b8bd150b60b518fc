"""`algorithm.*` and `critic.*`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.convert.rows import (
    ITSELF,
    SAME,
    Fate,
    When,
    computed,
    fixed,
    refuse,
    same,
    under,
)
from verl_trainers.convert.settings import not_offered, offered
from verl_trainers.convert.tables.actor import old_log_prob

if TYPE_CHECKING:
    from verl_trainers.convert.settings import Settings

__all__ = ["ALGORITHM"]

DISCOUNTED = When("algorithm.adv_estimator", ("gae", "reinforce_plus_plus"))
CRITIC = When("algorithm.adv_estimator", ("gae",))
KL_IN_REWARD = When("algorithm.use_kl_in_reward")
NEAR_KL = "actor_rollout_ref.actor.use_kl_loss=true with kl_loss_coef"
SAMPLED = "the ratio to the log-probs as sampled: actor_rollout_ref.actor.old_log_prob=rollout"
GROUPWISE = {"grpo_vectorized": "grpo"}


def estimator(value: object, settings: Settings) -> Fate:
    """Translate the name of the advantage estimator."""
    known = offered("verl_contracts.advantage_estimators", "grpo")
    name = GROUPWISE.get(str(value), value)
    if name != value:
        return Fate(kind="mapped", why="the same numbers, another implementation", values={ITSELF: name})
    if isinstance(value, str) and (value in known or "." in value):
        return Fate(kind=SAME, values={ITSELF: value})
    return refuse(not_offered("estimator", value, known), near="grpo", values={ITSELF: "grpo"})


ALGORITHM = (
    *under(
        "algorithm",
        (
            computed("adv_estimator", estimator, ITSELF, why="name of an estimator", default="gae"),
            same("norm_adv_by_std_in_grpo"),
            fixed("gamma", "rewards are not discounted", ok=(1,), when=DISCOUNTED),
            fixed("lam", "advantages have no horizon", ok=(1,), when=DISCOUNTED),
            fixed("use_kl_in_reward", "rewards are taken as they are", near=NEAR_KL),
            fixed("kl_penalty", "rewards are taken as they are", when=KL_IN_REWARD, near=NEAR_KL),
            fixed("kl_ctrl.**", "rewards are taken as they are", when=KL_IN_REWARD, near=NEAR_KL),
            fixed("filter_groups.enable", "groups of equal scores stay in the batch, with advantage 0"),
            fixed(
                "filter_groups.**",
                "groups of equal scores stay in the batch, with advantage 0",
                when=When("algorithm.filter_groups.enable"),
            ),
            computed(
                "rollout_correction.bypass_mode",
                old_log_prob,
                "actor_rollout_ref.actor.old_log_prob",
                why="what the ratio is taken against",
                default=False,
            ),
            fixed("rollout_correction.rollout_is", "samples have no weights", near=SAMPLED),
            fixed(
                "rollout_correction.rollout_is_*",
                "samples have no weights",
                when=When("algorithm.rollout_correction.rollout_is"),
                near=SAMPLED,
            ),
            fixed("rollout_correction.rollout_rs", "no sample is rejected", near=SAMPLED),
            fixed(
                "rollout_correction.rollout_rs_*",
                "no sample is rejected",
                when=When("algorithm.rollout_correction.rollout_rs"),
                near=SAMPLED,
            ),
            fixed(
                "rollout_correction.loss_type",
                "policy_loss.loss_mode decides",
                ok=("ppo_clip",),
                when=When("algorithm.rollout_correction.bypass_mode"),
            ),
            fixed("use_pf_ppo", "samples have no weights"),
            fixed("pf_ppo.**", "samples have no weights", when=When("algorithm.use_pf_ppo")),
        ),
    ),
    fixed("critic.enable", "there is no critic", near="algorithm.adv_estimator=grpo"),
    fixed("critic.**", "there is no critic", when=CRITIC, near="algorithm.adv_estimator=grpo"),
)
