"""Canonical names of parameters, whatever wraps the module."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_contracts.errors import StateError
from verl_trainers.workers.names import canonical_name, canonical_names

NAME = "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "wrapped",
    [
        NAME,
        f"_fsdp_wrapped_module.{NAME}",
        "_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.self_attn.q_proj.weight",
        f"_orig_mod.{NAME}",
        f"module.{NAME}",
        f"module.module.{NAME}",
        f"_orig_mod.module._fsdp_wrapped_module.{NAME}",
        f"base_model.model.{NAME.replace('q_proj', 'q_proj.base_layer')}",
        f"module._orig_mod.base_model.model.{NAME.replace('q_proj', 'q_proj.base_layer')}",
        "model.layers.3._checkpoint_wrapped_module.self_attn.q_proj.weight",
    ],
)
def test_wrappers_leave_no_trace(wrapped: str) -> None:
    assert canonical_name(wrapped) == NAME


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "module",
                "base_model",
                "model",
                "_orig_mod",
                "_fsdp_wrapped_module",
                "base_layer",
                "layers",
                "0",
                "weight",
            ]
        ),
        min_size=1,
        max_size=8,
    )
)
def test_canonical_name_is_idempotent(parts: list[str]) -> None:
    once = canonical_name(".".join(parts))
    assert canonical_name(once) == once


def test_a_component_that_only_looks_like_a_wrapper_stays() -> None:
    assert canonical_name("model.layers.0.module.weight") == "model.layers.0.module.weight"


def test_collisions_are_listed() -> None:
    with pytest.raises(StateError, match=r"lm_head.weight, module.lm_head.weight → lm_head.weight"):
        canonical_names(["lm_head.weight", "module.lm_head.weight", "other"])


def test_names_keep_their_order() -> None:
    assert list(canonical_names(["module.b", "module.a"]).items()) == [("module.b", "b"), ("module.a", "a")]
