"""Rollout for RL post-training: replicas, balancing, clients, agent loops."""

__version__ = "0.1.0"

__all__ = ["__version__"]
