"""Typed contracts between the packages of an RL post-training system.

Nothing is imported here on purpose: take each family from its own module
(`from verl_contracts.rollout import Replica`), and pay for that family only.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
