"""Every plug-in that a run names, loaded and checked in the driver before anything is placed.

One function loads all of them, so that a key is honoured in every mode or in none, and all bad ones are named at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_config, check_options, families, load_plugin
from verl_trainers.config.mistakes import Mistake
from verl_trainers.rewards.probe import RewardProbe
from verl_trainers.rewards.wire import Setup
from verl_trainers.tracking.jsonl import JsonlTracker
from verl_trainers.tracking.options import sort_options
from verl_trainers.tracking.run import ALWAYS, build_tracker
from verl_trainers.workers.algorithm import build_estimator, build_policy_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from verl_contracts.agents import AgentLoop, AgentLoopManager
    from verl_contracts.plugins import Family
    from verl_contracts.rewards import RewardFunction
    from verl_contracts.rollout import LLMServerManager
    from verl_contracts.runtime import Runtime
    from verl_contracts.tracking import Tracker
    from verl_contracts.training import AdvantageEstimator, PolicyLoss, TrainerMode
    from verl_contracts.weights import CheckpointEngineManager, WeightBackend
    from verl_trainers.config.schema import RunConfig

__all__ = ["RunPlugins", "load_plugins", "reward_function", "reward_key", "usable"]

P = TypeVar("P")

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlugins:
    """The classes that a run uses."""

    runtime: type[Runtime]
    mode: type[TrainerMode]
    llm_server_manager: type[LLMServerManager]
    checkpoint_manager: type[CheckpointEngineManager]
    weight_backend: type[WeightBackend]
    agent_loop_manager: type[AgentLoopManager]
    agent_loop: type[AgentLoop]
    reward: type[RewardFunction] | None
    """None when the agent loop scores its own samples, or nothing does."""
    advantage_estimator: type[AdvantageEstimator]
    policy_loss: type[PolicyLoss]
    trackers: tuple[type[Tracker], ...]


def reward_function(config: RunConfig) -> tuple[str, Mapping[str, object]] | None:
    """Return name or class path and options of the reward function that `config` asks for; None for none."""
    custom = config.reward.custom_reward_function
    if custom.path is not None:
        return "verl_trainers.rewards.verl_function:VerlFunction", {
            "path": custom.path,
            "name": custom.name,
            **config.reward.options,
        }
    return None if config.reward.name is None else (config.reward.name, config.reward.options)


def reward_key(config: RunConfig) -> str:
    """Return the key that names the reward function, for messages."""
    custom = config.reward.custom_reward_function.path is not None
    return "reward.custom_reward_function" if custom else "reward.name"


def load_plugins(config: RunConfig) -> tuple[RunPlugins | None, list[Mistake]]:
    """Load every class that `config` names and check its options. The classes are None when something is wrong."""
    probe = _probe_reward(config)
    loader = _Loader()
    try:
        plugins = _load_all(loader, config)
    finally:
        reason = None if probe is None else probe.finish()
    named, key = reward_function(config), reward_key(config)
    reward: type[RewardFunction] | None = None
    if reason is not None:
        loader.mistakes += [Mistake.parse(line, key=key) for line in reason.splitlines()]
    elif named is not None:
        reward = loader.load(families.REWARD_FUNCTION, named[0], key)
    if loader.mistakes or plugins is None:
        return None, loader.mistakes
    return replace(plugins, reward=reward), []


def usable(family: Family[P], spec: str | None) -> type[P] | None:
    """Return the class that `spec` names, None when it cannot be used, which `load_plugins` reports."""
    return _Loader().load(family, spec, family.key)


def _probe_reward(config: RunConfig) -> RewardProbe | None:
    """Begin to load the reward function elsewhere, while the driver loads the other plug-ins."""
    named = reward_function(config)
    if named is None or config.reward.start_limit_s <= 0:
        return None
    return RewardProbe(
        Setup(
            function=named[0],
            options=named[1],
            key=reward_key(config),
            limit_s=config.reward.limit_s,
            start_limit_s=config.reward.start_limit_s,
        )
    )


def _load_all(loader: _Loader, config: RunConfig) -> RunPlugins | None:
    """Load all but the reward function."""
    rollout, agent = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.agent
    engine, loss = rollout.checkpoint_engine, config.actor_rollout_ref.actor.policy_loss

    runtime = loader.load(families.RUNTIME, config.runtime, "runtime")
    loader.options(runtime, config.runtime_options, "runtime_options")
    mode = loader.load(families.TRAINER_MODE, config.trainer.mode, "trainer.mode")
    servers = loader.load(
        families.LLM_SERVER_MANAGER, rollout.llm_server_manager_class, f"{_ROLLOUT}.llm_server_manager_class"
    )
    loader.options(servers, rollout.llm_server_manager_options, f"{_ROLLOUT}.llm_server_manager_options")
    checkpoint = loader.load(
        families.CHECKPOINT_MANAGER, rollout.checkpoint_manager_class, f"{_ROLLOUT}.checkpoint_manager_class"
    )
    loader.options(checkpoint, engine.engine_kwargs, f"{_ROLLOUT}.checkpoint_engine.engine_kwargs")
    backend = loader.load(families.WEIGHT_BACKEND, engine.backend, f"{_ROLLOUT}.checkpoint_engine.backend")
    manager = loader.load(
        families.AGENT_LOOP_MANAGER, agent.agent_loop_manager_class, f"{_ROLLOUT}.agent.agent_loop_manager_class"
    )
    loader.options(manager, agent.agent_loop_manager_options, f"{_ROLLOUT}.agent.agent_loop_manager_options")
    loop = loader.load(families.AGENT_LOOP, agent.default_agent_loop, f"{_ROLLOUT}.agent.default_agent_loop")
    if loop is not None:
        key = f"{_ROLLOUT}.agent.agent_loop_options"
        loader.build(lambda: check_options(loop, agent.agent_loop_options, key=key, arguments=("client",)), key)
    estimator = loader.load(families.ADVANTAGE_ESTIMATOR, config.algorithm.adv_estimator, "algorithm.adv_estimator")
    policy_loss = loader.load(families.POLICY_LOSS, loss.loss_mode, "actor_rollout_ref.actor.policy_loss.loss_mode")
    if estimator is not None:
        loader.build(lambda: build_estimator(config.algorithm), "algorithm.adv_estimator")
    if policy_loss is not None:
        loader.build(lambda: build_policy_loss(config.actor_rollout_ref.actor), "actor_rollout_ref.actor.policy_loss")
    trackers = loader.trackers(config)

    if (
        runtime is None
        or mode is None
        or servers is None
        or checkpoint is None
        or backend is None
        or manager is None
        or loop is None
        or estimator is None
        or policy_loss is None
    ):
        return None
    return RunPlugins(
        runtime=runtime,
        mode=mode,
        llm_server_manager=servers,
        checkpoint_manager=checkpoint,
        weight_backend=backend,
        agent_loop_manager=manager,
        agent_loop=loop,
        advantage_estimator=estimator,
        policy_loss=policy_loss,
        trackers=tuple(tracker for tracker in trackers if tracker is not None),
        reward=None,
    )


class _Loader:
    """Loads, and notes what cannot be loaded."""

    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def load(self, family: Family[P], spec: str | None, key: str) -> type[P] | None:
        """Load one class; an unset `spec` means the family's default."""
        name = spec or family.default or "default"
        try:
            return load_plugin(family, name, key=key, role="driver")
        except ConfigError as exc:
            self._note(exc, key)
        except SystemExit as exc:
            self._note(ConfigError(f"{name}: importing it ended the process (SystemExit: {exc.code})"), key)
        return None

    def options(self, cls: object, options: Mapping[str, object], key: str) -> None:
        """Check the options of a class that has a `Config`."""
        config_class = getattr(cls, "Config", None)
        if isinstance(config_class, type):
            self.build(lambda: build_config(config_class, options, key=key), key)

    def build(self, make: Callable[[], object], key: str) -> None:
        """Build a plug-in once or check it otherwise, as its process will, so that wrong options are found now."""
        try:
            make()
        except (Exception, SystemExit) as exc:  # a class of the user's: whatever it raises is a mistake of this key
            self._note(exc if isinstance(exc, ConfigError) else ConfigError(f"{type(exc).__name__}: {exc}"), key)

    def trackers(self, config: RunConfig) -> list[type[Tracker] | None]:
        """Load the trackers and build each once, which begins nothing and needs its library."""
        chosen = config.trainer.logger
        names = chosen if ALWAYS in chosen else (ALWAYS, *chosen)
        given = sort_options(config.trainer.logger_options, names)
        classes: list[type[Tracker] | None] = []
        for name in chosen:
            cls = self.load(families.TRACKER, name, "trainer.logger")
            classes.append(cls)
            if cls is not None:
                self.build(partial(build_tracker, cls, config.trainer, name), given.of(name).key)
        if ALWAYS not in chosen:
            self.build(partial(build_tracker, JsonlTracker, config.trainer, ALWAYS), given.of(ALWAYS).key)
        for key, text in given.problems.items():
            self._note(ConfigError(text), key)
        return classes

    def _note(self, exc: ConfigError, key: str) -> None:
        self.mistakes += Mistake.parse_all(str(exc), key=key)
