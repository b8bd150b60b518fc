"""What follows from a mode's plan: the settings of replicas, and whether machine and replicas suffice for it.

Knows no runtime by name. A runtime that is told how much it may give away, by ``num_cpus`` or ``num_gpus`` in its
options, is believed; one that joins a cluster, by ``address``, knows better and refuses with what is free per node.
"""

from __future__ import annotations

import inspect
import os
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from verl_contracts.errors import ConfigError
from verl_contracts.rollout import RolloutSettings
from verl_trainers.config.engine import PER_REPLICA, devices_per_replica, engine_options, option_keys, product
from verl_trainers.config.mistakes import Mistake

if TYPE_CHECKING:
    from verl_contracts.rollout import ChecksSettings, LLMServerManager
    from verl_contracts.training import Placement
    from verl_trainers.config.schema import RunConfig

__all__ = [
    "Fit",
    "build_rollout_settings",
    "check_replicas",
    "check_resources",
    "check_servers",
    "fit_devices",
    "max_model_len",
    "run_device",
    "whole_replicas",
]

_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model.path"


def run_device(config: RunConfig) -> str:
    """Return ``cpu`` or ``cuda``: what ``trainer.device`` means on this machine."""
    if config.trainer.device != "auto":
        return config.trainer.device
    import torch  # here, because importing it takes a second

    return "cuda" if torch.cuda.is_available() else "cpu"


def max_model_len(config: RunConfig) -> int:
    """Return the most tokens of prompt and response together that a replica takes."""
    return config.actor_rollout_ref.rollout.max_model_len or (
        config.data.max_prompt_length + config.data.max_response_length
    )


def build_rollout_settings(config: RunConfig, placement: Placement) -> RolloutSettings:
    """Return what the LLM server manager is told."""
    rollout = config.actor_rollout_ref.rollout
    each = devices_per_replica(rollout)
    return RolloutSettings(
        model_path=config.actor_rollout_ref.model.path,
        engine=rollout.name,
        engine_options=engine_options(rollout),
        num_replicas=max(1, placement.standalone_devices // each),
        devices_per_replica=each,
        device=config.trainer.device,
        dtype=rollout.dtype,
        max_model_len=max_model_len(config),
        max_num_seqs=rollout.max_num_seqs,
        seed=config.trainer.seed,
        deterministic=config.deterministic,
        weight_backend=rollout.checkpoint_engine.backend,
        resumable=rollout.partial_rollout,
        request_limit_s=rollout.request_limit_s,
        options=rollout.llm_server_manager_options,
    )


def whole_replicas(config: RunConfig, placement: Placement) -> Placement:
    """Return `placement` with devices for whole replicas, where nobody said how many devices they get."""
    if config.actor_rollout_ref.rollout.n_gpus_per_node is not None:
        return placement
    each = devices_per_replica(config.actor_rollout_ref.rollout)
    return replace(placement, standalone_devices=-(-placement.standalone_devices // each) * each)


def check_servers(config: RunConfig, placement: Placement, servers: type[LLMServerManager]) -> list[Mistake]:
    """Ask the LLM server manager whether it could serve, if it `ChecksSettings`."""
    if not isinstance(inspect.getattr_static(servers, "check", None), classmethod):
        return []
    try:
        cast("type[ChecksSettings]", servers).check(build_rollout_settings(config, placement))
    except ConfigError as exc:
        # What an own key says of an option is checked already, and is not repeated for the option itself.
        options = option_keys(config.actor_rollout_ref.rollout)
        found = [Mistake.parse(line) for line in str(exc).splitlines()]
        return [
            replace(mistake, uses=options) if mistake.key.startswith(options[0]) else mistake
            for mistake in found
            if config.prepare is None or mistake.key != _MODEL  # it may be yet to be made
        ]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Devices that a plan wants, and those of the one node that they are wanted from."""

    node: str
    device: str
    """``CPU`` or ``GPU``; on CPU a device is a core."""
    to_train: int
    for_replicas: int
    has: float
    source: str
    """Who says how many there are."""

    @property
    def wanted(self) -> int:
        """All devices together."""
        return self.to_train + self.for_replicas

    def __str__(self) -> str:
        sums = f"{self.to_train} to train + {self.for_replicas} for replicas = {self.wanted} {self.device}"
        return f"node {self.node}: wanted {sums}, free {self.has:g} {self.device} ({self.source})"


def fit_devices(config: RunConfig, placement: Placement) -> Fit | None:
    """Return what is wanted and there; None when the runtime joins a cluster, which nobody asks before the start."""
    if config.runtime_options.get("address") is not None:
        return None
    device = "CPU" if run_device(config) == "cpu" else "GPU"
    key = "num_cpus" if device == "CPU" else "num_gpus"
    told = config.runtime_options.get(key)
    if isinstance(told, (int, float)):
        has, source = float(told), f"runtime_options.{key}"
    elif device == "CPU":
        has, source = float(len(os.sched_getaffinity(0))), "this machine's cores"
    else:
        import torch

        has, source = float(torch.cuda.device_count()), "this machine's GPUs"
    return Fit(
        node=socket.gethostname(),
        device=device,
        to_train=placement.trainer_devices,
        for_replicas=placement.standalone_devices,
        has=has,
        source=source,
    )


def check_resources(config: RunConfig, placement: Placement) -> list[Mistake]:
    """Return what does not fit this machine. Says nothing when the runtime joins a cluster."""
    fit = fit_devices(config, placement)
    if fit is None or fit.wanted <= fit.has:
        return []
    if fit.device == "GPU" and fit.has == 0:
        text = "is cuda, and this machine has no GPU that torch can use; set trainer.device=cpu"
        return [Mistake(key="trainer.device", text=text)]
    return [
        Mistake(
            key="trainer.n_gpus_per_node",
            text=f"{fit}; lower it or {_ROLLOUT}.n_gpus_per_node{_or_each(config)}, or choose trainer.mode=sync, where "
            "replicas share the trainer's devices",
            uses=(f"{_ROLLOUT}.n_gpus_per_node", "trainer.mode", *PER_REPLICA),
        )
    ]


def _or_each(config: RunConfig) -> str:
    """Name what a replica's devices come from, where it has several."""
    rollout = config.actor_rollout_ref.rollout
    each = devices_per_replica(rollout)
    return "" if each == 1 else f" or {product(rollout)}, of which each replica gets {each}"


def check_replicas(config: RunConfig, placement: Placement) -> list[Mistake]:
    """Return what cannot hold for the number of replicas that follows from the placement."""
    rollout = config.actor_rollout_ref.rollout
    each, ranks = devices_per_replica(rollout), placement.trainer_devices
    if placement.hybrid and ranks % each:
        return [
            Mistake(
                key=PER_REPLICA[0],
                text=f"replicas share the trainer's devices, so {product(rollout)} must divide "
                f"trainer.n_gpus_per_node ({ranks} % {each} = {ranks % each})",
                uses=(PER_REPLICA[1], "trainer.n_gpus_per_node"),
            )
        ]
    replicas = (placement.standalone_devices + (ranks if placement.hybrid else 0)) // each
    wanted = rollout.checkpoint_engine.min_healthy
    if wanted <= replicas:
        return []
    return [
        Mistake(
            key=f"{_ROLLOUT}.checkpoint_engine.min_healthy",
            text=f"is {wanted}, and there are {replicas} replicas: no sync could ever succeed; lower it, or give "
            "replicas more devices",
            uses=(f"{_ROLLOUT}.n_gpus_per_node", "trainer.n_gpus_per_node", *PER_REPLICA),
        )
    ]
