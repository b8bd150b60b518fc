"""A configuration that is right, as a base for tests that break it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.config.build import build_run_config
from verl_trainers.config.check import check_relations
from verl_trainers.config.sources import Sources, read_sources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_trainers.config.schema import RunConfig

GOOD = ("data.train_files=[train.jsonl]", "actor_rollout_ref.model.path=model", "reward.name=copy")
"""What every configuration must say."""


def mistakes_of(*overrides: str) -> list[str]:
    """Every mistake, of reading and of the rules between keys, on top of a right configuration."""
    config, mistakes = build_run_config(read_sources(None, [*GOOD, *overrides]))
    broken = {mistake.key for mistake in mistakes}
    found = [m for m in check_relations(config) if not broken & {m.key, *m.uses}]
    return [str(mistake) for mistake in [*mistakes, *found]]


def build_tree(tree: Mapping[str, object]) -> tuple[RunConfig, list[str]]:
    """Build from a plain tree, as it comes out of a file."""
    config, mistakes = build_run_config(Sources(tree=tree, places={}))
    return config, [str(mistake) for mistake in mistakes]
