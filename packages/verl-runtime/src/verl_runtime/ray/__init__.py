"""Actors in processes of their own, placed and started by Ray. Importing this package does not import Ray."""

from __future__ import annotations

from verl_runtime.ray.runtime import RayConfig, RayRuntime

__all__ = ["RayConfig", "RayRuntime"]
