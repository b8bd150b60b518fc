"""Which kinds of plug-in there are: their Protocol, their entry-point group, and how they are constructed.

This table is all that loading knows about a family, so a new one is a line here and a Protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from verl_contracts.agents import AgentLoop, AgentLoopManager
from verl_contracts.rewards import RewardFunction
from verl_contracts.rollout import LLMServerManager
from verl_contracts.runtime import Runtime
from verl_contracts.tracking import Tracker
from verl_contracts.training import AdvantageEstimator, PolicyLoss, TrainerMode
from verl_contracts.weights import CheckpointEngineManager, TopologyPlanner, WeightBackend, WeightReceiver, WeightSender

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ADVANTAGE_ESTIMATOR",
    "AGENT_LOOP",
    "AGENT_LOOP_MANAGER",
    "CHECKPOINT_MANAGER",
    "FAMILIES",
    "LLM_SERVER_MANAGER",
    "POLICY_LOSS",
    "REWARD_FUNCTION",
    "RUNTIME",
    "TRACKER",
    "TRAINER_MODE",
    "WEIGHT_BACKEND",
    "Family",
    "Part",
]

P_co = TypeVar("P_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A class that a plug-in names in one of its own attributes, and that must meet a contract too."""

    attribute: str
    protocol: type
    arguments: tuple[str, ...]
    """Keywords that it is constructed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[P_co]):
    """One kind of plug-in."""

    name: str
    """How messages call it, for example ``"agent loop"``."""
    group: str
    """Entry-point group in which distributions offer it."""
    protocol: type[P_co]
    """What a class of this family must offer."""
    key: str
    """Config key that names one."""
    contract_version: str = "0.1"
    """``major.minor`` of the Protocol that is installed here."""
    default: str | None = None
    """Name that is used when the key is unset; None when there is no default."""
    arguments: tuple[str, ...] | None = None
    """Keywords that the class is always called with, its own options apart.

    None when the class is not called from outside: it has a `create`, or is never instantiated.
    """
    parts: tuple[Part, ...] = ()
    """Further classes that are checked with it."""


RUNTIME: Final = Family(name="runtime", group="verl_contracts.runtimes", protocol=Runtime, key="runtime", default="ray")
LLM_SERVER_MANAGER: Final = Family(
    name="LLM server manager",
    group="verl_contracts.llm_server_managers",
    protocol=LLMServerManager,
    key="actor_rollout_ref.rollout.llm_server_manager_class",
    default="default",
)
CHECKPOINT_MANAGER: Final = Family(
    name="checkpoint-engine manager",
    group="verl_contracts.checkpoint_managers",
    protocol=CheckpointEngineManager,
    key="actor_rollout_ref.rollout.checkpoint_manager_class",
    default="default",
)
AGENT_LOOP_MANAGER: Final = Family(
    name="agent-loop manager",
    group="verl_contracts.agent_loop_managers",
    protocol=AgentLoopManager,
    key="actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    default="default",
)
AGENT_LOOP: Final = Family(
    name="agent loop",
    group="verl_contracts.agent_loops",
    protocol=AgentLoop,
    key="actor_rollout_ref.rollout.agent.default_agent_loop",
    default="single_turn",
    arguments=("client",),
)
WEIGHT_BACKEND: Final = Family(
    name="weight backend",
    group="verl_contracts.weight_backends",
    protocol=WeightBackend,
    key="actor_rollout_ref.rollout.checkpoint_engine.backend",
    default="shm",
    parts=(
        Part(attribute="sender_class", protocol=WeightSender, arguments=("owner", "rank", "clock")),
        Part(attribute="receiver_class", protocol=WeightReceiver, arguments=("owner", "clock")),
        Part(attribute="planner_class", protocol=TopologyPlanner, arguments=()),
    ),
)
REWARD_FUNCTION: Final = Family(
    name="reward function",
    group="verl_contracts.reward_functions",
    protocol=RewardFunction,
    key="reward.name",
    arguments=(),
)
ADVANTAGE_ESTIMATOR: Final = Family(
    name="advantage estimator",
    group="verl_contracts.advantage_estimators",
    protocol=AdvantageEstimator,
    key="algorithm.adv_estimator",
    default="grpo",
    arguments=(),
)
POLICY_LOSS: Final = Family(
    name="policy loss",
    group="verl_contracts.policy_losses",
    protocol=PolicyLoss,
    key="actor_rollout_ref.actor.policy_loss.loss_mode",
    default="ppo_clip",
    arguments=(),
)
TRAINER_MODE: Final = Family(
    name="trainer mode",
    group="verl_contracts.trainer_modes",
    protocol=TrainerMode,
    key="trainer.mode",
    default="sync",
    arguments=(),
)
TRACKER: Final = Family(
    name="tracker", group="verl_contracts.trackers", protocol=Tracker, key="trainer.logger", arguments=()
)

FAMILIES: Final[Mapping[str, Family[object]]] = {
    family.group: family
    for family in (
        RUNTIME,
        LLM_SERVER_MANAGER,
        CHECKPOINT_MANAGER,
        AGENT_LOOP_MANAGER,
        AGENT_LOOP,
        WEIGHT_BACKEND,
        REWARD_FUNCTION,
        ADVANTAGE_ESTIMATOR,
        POLICY_LOSS,
        TRAINER_MODE,
        TRACKER,
    )
}
"""Entry-point group → family."""
