"""What nothing means: any mix of absent, null, {} and "" is a configuration or mistakes by key, and no other error.

For a section absent, null and {} are its default; for a leaf null is one where its type says so, and "" and {} are
"unset" for names. The same must hold of many at once, through every rule and the writing of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_origin

from config_cases import build_tree
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_contracts.training import Placement
from verl_trainers.config.build import NAME_KEYS, leaf_keys, section_keys
from verl_trainers.config.check import check_files, check_relations
from verl_trainers.config.dump import dump_config
from verl_trainers.config.placing import build_rollout_settings, check_replicas, check_resources, max_model_len
from verl_trainers.config.plugins import reward_function

LEAVES = leaf_keys()
NOTHING: tuple[object, ...] = (None, {}, "")
CHOICES = st.dictionaries(
    st.sampled_from(sorted([*LEAVES, *section_keys()])), st.sampled_from(NOTHING), min_size=1, max_size=12
)


def tree_of(choices: Mapping[str, object]) -> dict[str, object]:
    """Nest `choices`; what lies in a section that is nothing itself is absent."""
    tree: dict[str, object] = {}
    for key in sorted(choices):
        *sections, leaf = key.split(".")
        inside = tree
        for name in sections:
            inner = inside.setdefault(name, {})
            if not isinstance(inner, dict):
                break
            inside = inner
        else:
            inside[leaf] = {} if choices[key] == {} else choices[key]
    return tree


def is_set(tree: Mapping[str, object], key: str) -> bool:
    """Whether no section around `key` is nothing."""
    head, _, rest = key.partition(".")
    inner = tree.get(head)
    return head in tree if not rest else isinstance(inner, Mapping) and is_set(inner, rest)


def may_be(key: str, nothing: object) -> bool:
    """Whether the rule allows it."""
    if key not in LEAVES:
        return nothing != ""
    hint = LEAVES[key]
    if nothing is None:
        return type(None) in getattr(hint, "__args__", ()) or get_origin(hint) is Mapping
    return key in NAME_KEYS or (nothing == {} and get_origin(hint) is Mapping)


@settings(max_examples=150, deadline=None)
@given(CHOICES)
@example({"actor_rollout_ref.rollout.agent": None, "actor_rollout_ref.rollout.agent.agent_loop_manager_class": None})
@example(dict.fromkeys(section_keys(), None))
@example(dict.fromkeys(LEAVES, ""))
@example(dict.fromkeys(LEAVES, None))
def test_any_mix_of_nothing_is_a_configuration_or_mistakes_by_key(choices: dict[str, object]) -> None:
    tree = tree_of(choices)
    config, mistakes = build_tree(tree)
    named = {mistake.partition(": ")[0] for mistake in mistakes}
    for key, nothing in choices.items():
        if is_set(tree, key) and key in LEAVES:
            assert (key in named) == (not may_be(key, nothing)), mistakes
    assert named <= choices.keys()
    placement = Placement(trainer_devices=config.trainer.n_gpus_per_node, hybrid=True)
    for found in (*check_relations(config), *check_files(config), *check_resources(config, placement)):
        assert found.key
    assert check_replicas(config, placement) == []
    assert build_rollout_settings(config, placement).max_model_len == max_model_len(config)
    assert reward_function(config) is None
    assert dump_config(config)
