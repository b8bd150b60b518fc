"""Which inference engines there are. An engine is found by name or class path, like every other plug-in.

The names belong to this package, since only its replicas host engines; others may offer more in the same group.
"""

from __future__ import annotations

from typing import Final

from verl_contracts.plugins import Family
from verl_rollout.engine.base import Engine

__all__ = ["ENGINE", "ENGINE_KEY", "ENGINE_OPTIONS_KEY"]

ENGINE_KEY: Final = "actor_rollout_ref.rollout.name"
"""Config key that names the engine, for messages."""

ENGINE_OPTIONS_KEY: Final = "actor_rollout_ref.rollout.engine_kwargs"
"""Config key of the engine's options, for messages."""

ENGINE: Final = Family(
    name="inference engine", group="verl_rollout.engines", protocol=Engine, key=ENGINE_KEY, default="torch"
)
