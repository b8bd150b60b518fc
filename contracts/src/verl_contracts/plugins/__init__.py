"""Plug-ins: found by name or class path, and checked against their contract before anything is started.

manager_class = load_plugin(families.LLM_SERVER_MANAGER, "default", key="actor_rollout_ref.rollout...")
config = build_config(MyManager.Config, settings.options, key="actor_rollout_ref.rollout.options")
"""

from __future__ import annotations

from verl_contracts.plugins import families
from verl_contracts.plugins.config import build_config, build_plugin, check_options, resolve_optional
from verl_contracts.plugins.families import FAMILIES, Family
from verl_contracts.plugins.finding import find_class
from verl_contracts.plugins.loading import available, check_plugin, load_plugin

__all__ = [
    "FAMILIES",
    "Family",
    "available",
    "build_config",
    "build_plugin",
    "check_options",
    "check_plugin",
    "families",
    "find_class",
    "load_plugin",
    "resolve_optional",
]
