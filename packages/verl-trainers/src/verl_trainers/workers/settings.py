"""What one rank is told, as plain data that can be pickled into its process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from verl_trainers.config.schema import ActorConfig, AlgorithmConfig, ModelConfig, RefConfig

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One rank's part of a policy."""

    model: ModelConfig
    total_steps: int
    """Steps of the whole run, for the schedule of the learning rate."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    temperature: float = 1.0
    """At which the replicas sample."""
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which weights are sent away."""
    rank: int = 0
    world_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int = 1
    """Of torch, on CPU."""
