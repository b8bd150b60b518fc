"""`reward.*`, and the older names `reward_model.*`, `custom_reward_function.*` and `sandbox_fusion.*`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.convert.rows import COST, Fate, When, computed, fixed, keep, mapped, moved, same

if TYPE_CHECKING:
    from verl_trainers.convert.rows import Row
    from verl_trainers.convert.settings import Settings

__all__ = ["REWARD"]

_FUNCTION = "reward.custom_reward_function"
NO_MODEL = "rewards are functions"
NEAR_FUNCTION = f"{_FUNCTION}.path, with a function that asks the model"
NEAR_PENALTY = f"a penalty in the function at {_FUNCTION}.path"


def processes(value: object, settings: Settings) -> Fate:
    """Translate the number of reward workers in all into one for each agent-loop worker."""
    if not isinstance(value, int) or value < 1:
        return keep("not set")
    agents = settings.number("actor_rollout_ref.rollout.agent.num_workers", 1)
    each = -(-value // agents)
    return mapped({"reward.num_processes": each}, f"{value} in all / {agents} agent-loop workers, rounded up")


def _manager(key: str) -> Row:
    return fixed(key, "each sample is scored by itself", ok=("naive",), near=NEAR_PENALTY)


REWARD = (
    same(f"{_FUNCTION}.path"),
    same(f"{_FUNCTION}.name"),
    moved(f"{_FUNCTION}.reward_kwargs.**", "reward.options.**", why="keywords of the function"),
    moved("custom_reward_function.path", f"{_FUNCTION}.path", why="the older name"),
    moved("custom_reward_function.name", f"{_FUNCTION}.name", why="the older name"),
    moved("custom_reward_function.reward_kwargs.**", "reward.options.**", why="keywords of the function"),
    computed("reward.num_workers", processes, "reward.num_processes", why="processes of each agent-loop worker"),
    computed("reward_model.num_workers", processes, "reward.num_processes", why="the older name"),
    _manager("reward.reward_manager.name"),
    _manager("reward_model.reward_manager"),
    fixed(
        "reward.reward_manager.source", "a function is named by its file", ok=("register",), near=f"{_FUNCTION}.path"
    ),
    fixed("reward.reward_manager.**", "a function is named by its file", ok=("custom_reward_manager",)),
    *(
        row
        for section in ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer")
        for row in (
            fixed(f"{section}.enable", "long answers are not penalized", near=NEAR_PENALTY),
            fixed(f"{section}.**", "long answers are not penalized", when=When(f"{section}.enable"), near=NEAR_PENALTY),
        )
    ),
    *(
        row
        for section in ("reward_model.reward_kwargs.overlong_buffer_cfg",)
        for row in (
            fixed(f"{section}.enable", "long answers are not penalized", near=NEAR_PENALTY),
            fixed(f"{section}.**", "long answers are not penalized", when=When(f"{section}.enable"), near=NEAR_PENALTY),
        )
    ),
    fixed("reward.reward_kwargs.max_resp_len", "is data.max_response_length", any_value=True),
    fixed("reward_model.reward_kwargs.max_resp_len", "is data.max_response_length", any_value=True),
    fixed("reward.reward_kwargs.**", "there is one way to score", near="reward.options"),
    fixed("reward_model.reward_kwargs.**", "there is one way to score", near="reward.options"),
    fixed("reward.reward_model.enable", NO_MODEL, near=NEAR_FUNCTION),
    fixed("reward.reward_model.**", NO_MODEL, when=When("reward.reward_model.enable"), near=NEAR_FUNCTION),
    fixed("reward_model.enable", NO_MODEL, near=NEAR_FUNCTION),
    fixed("reward_model.launch_reward_fn_async", "rewards run beside generation", any_value=True),
    fixed("reward_model.strategy", NO_MODEL, any_value=True),
    fixed("reward_model.**", NO_MODEL, when=When("reward_model.enable"), near=NEAR_FUNCTION),
    *(
        row
        for section in ("reward.sandbox_fusion", "sandbox_fusion")
        for row in (
            fixed(f"{section}.url", "code runs in no sandbox", near=f"{_FUNCTION}.path, with a function that asks one"),
            fixed(f"{section}.**", "code runs in no sandbox", when=When(f"{section}.url"), loses=COST),
        )
    ),
)
