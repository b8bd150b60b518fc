"""What becomes of each of upstream's keys: data, one module for each section of its configuration."""

from __future__ import annotations

from verl_trainers.convert.tables.actor import ACTOR
from verl_trainers.convert.tables.algorithm import ALGORITHM
from verl_trainers.convert.tables.asynchrony import ASYNCHRONY
from verl_trainers.convert.tables.data import DATA
from verl_trainers.convert.tables.model import MODEL
from verl_trainers.convert.tables.others import OTHERS
from verl_trainers.convert.tables.reward import REWARD
from verl_trainers.convert.tables.rollout import ROLLOUT
from verl_trainers.convert.tables.trainer import TRAINER

__all__ = ["TABLE"]

TABLE = (*OTHERS, *DATA, *MODEL, *ACTOR, *ROLLOUT, *ALGORITHM, *REWARD, *TRAINER, *ASYNCHRONY)
"""All rows. Of two that match a key, the first one counts, and one without a pattern before one with."""
