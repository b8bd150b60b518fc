"""What vLLM is told of adapters, and what of it a user may not say in vLLM's own words."""

from __future__ import annotations

import pytest

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_config
from verl_contracts.rollout import RolloutSettings
from verl_rollout.engine.vllm.arguments import engine_arguments
from verl_rollout.engine.vllm.builds import on_cpu
from verl_rollout.engine.vllm.options import VLLMOptions

LORA = ("enable_lora", "max_loras", "max_lora_rank")


def test_vllm_is_told_of_adapters_only_when_there_may_be_some() -> None:
    settings = RolloutSettings(model_path="nowhere")

    def told(**options: object) -> list[object]:
        made = build_config(VLLMOptions, {"kv_cache_gib": 1.0, **options}, key="engine_kwargs")
        arguments = engine_arguments(settings, made, rank=0)
        return [arguments.get(name) for name in LORA]

    assert told() == told(max_lora_rank=64) == [None, None, None]
    spare = 1 if on_cpu() else 0
    assert told(max_loras=2) == [True, 2 + spare, 16]
    assert told(max_loras=1, max_lora_rank=8) == [True, 1 + spare, 8]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_loras": -1}, "max_loras must be at least 0, got -1"),
        ({"max_lora_rank": 4}, "max_lora_rank must be one of 1, 8, 16, .*, got 4"),
        ({"engine_args": {"enable_lora": True}}, "enable_lora is set by .*engine_kwargs.max_loras"),
        ({"engine_args": {"max_lora_rank": 8}}, "max_lora_rank is set by .*engine_kwargs.max_lora_rank"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config(VLLMOptions, options, key="engine_kwargs")
