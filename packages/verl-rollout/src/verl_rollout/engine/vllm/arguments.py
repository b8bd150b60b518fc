"""What vLLM is told, from the settings and the options. Imports nothing of vLLM.

What vLLM would only find out after it has started, or at the first request, is refused here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from verl_contracts.errors import ConfigError
from verl_rollout.engine.vllm.builds import CPU_HEAD_SIZES, check_device, on_cpu
from verl_rollout.engine.vllm.plugin import NAME

if TYPE_CHECKING:
    from verl_contracts.rollout import RolloutSettings
    from verl_rollout.engine.vllm.options import VLLMOptions

__all__ = ["engine_arguments"]

_MODEL: Final = "actor_rollout_ref.model.path"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_GIB: Final = 2**30
_BLOCK: Final = 128
"""Tokens in a block of the cache of the CPU build."""


def engine_arguments(settings: RolloutSettings, options: VLLMOptions, *, rank: int) -> dict[str, object]:
    """Return the keyword arguments of `AsyncEngineArgs`. Raises `ConfigError` for what this build cannot serve."""
    copies, devices = options.data_parallel_size, settings.devices_per_replica
    if devices % copies:
        raise ConfigError(
            f"{_ROLLOUT}.engine_kwargs.data_parallel_size is {copies}, and a replica has {devices} devices "
            f"({_ROLLOUT}.tensor_model_parallel_size): {devices} must be a multiple of {copies}"
        )
    check_device(settings)
    cpu, each = on_cpu(), devices // copies
    attention = _attention(settings, options, cpu=cpu)
    if attention is not None:
        attention.check(each, cpu=cpu)
    if options.openai_server:
        _check_tokenizer(str(options.engine_args.get("tokenizer", settings.model_path)))
    sequences = -(-settings.max_num_seqs // copies)
    tokens = options.max_num_batched_tokens
    if tokens is not None and tokens < sequences:
        raise ConfigError(
            f"{_ROLLOUT}.max_num_batched_tokens is {tokens}, and {sequences} sequences are decoded at once "
            f"({_ROLLOUT}.max_num_seqs): a step needs room for a token of each"
        )
    arguments: dict[str, object] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "load_format": "dummy",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": sequences,
        "seed": settings.seed + rank,
        "tensor_parallel_size": each,
        "data_parallel_size": copies,
        "enforce_eager": cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": not options.openai_server,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "weight_transfer_config": {"backend": NAME},
    }
    if not cpu:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
    if options.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * _GIB)
    elif cpu and attention is not None:
        arguments["kv_cache_memory_bytes"] = attention.cache_bytes(settings, sequences=sequences, devices=each)
    if options.max_loras:
        arguments["enable_lora"] = True
        # The CPU build computes what has no adapter with the last slot, next to what has one: that slot stays empty.
        arguments["max_loras"] = options.max_loras + cpu
        arguments["max_lora_rank"] = options.max_lora_rank
    if options.enable_chunked_prefill is not None:
        arguments["enable_chunked_prefill"] = options.enable_chunked_prefill
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    return {**arguments, **options.engine_args}


def _check_tokenizer(folder: str) -> None:
    """Refuse a folder without one: transformers would make up an empty tokenizer, and every prompt would be empty."""
    if Path(folder).is_dir() and not any(Path(folder).glob("tokenizer*")):
        raise ConfigError(
            f"{_ROLLOUT}.engine_kwargs.openai_server: is true, and {folder} has no tokenizer to read text with: save "
            f"one there, or set it to false"
        )


def _attention(settings: RolloutSettings, options: VLLMOptions, *, cpu: bool) -> _Attention | None:
    """Return what is known of the model; None where it is not, and not needed either."""
    try:
        return _Attention.read(settings.model_path)
    except ConfigError:
        if cpu and options.kv_cache_gib is None:
            raise
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """The attention of a model, as its folder describes it."""

    path: Path
    heads: int
    kv_heads: int
    size: int
    layers: int
    latent: bool
    """Whether keys and values are compressed, which has kernels and sizes of its own."""

    @classmethod
    def read(cls, folder: str) -> Self:
        """Raises `ConfigError` where the folder does not say, or in other words than most."""
        path = Path(folder) / "config.json"
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            config = whole.get("text_config") or whole
            heads = int(config["num_attention_heads"])
            return cls(
                path=path,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                size=int(config.get("head_dim") or config["hidden_size"] // heads),
                layers=int(config["num_hidden_layers"]),
                latent=config.get("kv_lora_rank") is not None,
            )
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as exc:
            raise ConfigError(
                f"{_MODEL}: {path} does not tell how much cache a token needs ({exc!r}): if it is a language model, "
                f"set {_ROLLOUT}.engine_kwargs.kv_cache_gib"
            ) from exc

    def check(self, devices: int, *, cpu: bool) -> None:
        """Refuse heads that vLLM cannot compute, or cannot divide among `devices`."""
        whole = self.kv_heads % devices == 0 or devices % self.kv_heads == 0
        if self.heads % devices or not (whole or self.latent):
            raise ConfigError(
                f"{_ROLLOUT}.tensor_model_parallel_size: {devices} devices cannot share the {self.heads} attention "
                f"heads and {self.kv_heads} key-value heads of {self.path}: {devices} must divide both"
            )
        if cpu and not self.latent and self.size not in CPU_HEAD_SIZES:
            raise ConfigError(
                f"{_MODEL}: {self.path} has attention heads of size {self.size}, and the CPU build of vLLM computes "
                f"only {', '.join(map(str, CPU_HEAD_SIZES))}: take another model, or {_ROLLOUT}.name=torch"
            )

    def cache_bytes(self, settings: RolloutSettings, *, sequences: int, devices: int) -> int:
        """Return the cache of one of `devices`: keys and values of every layer and token, in whole blocks."""
        blocks = sequences * -(-settings.max_model_len // _BLOCK) + 1
        element = 4 if settings.dtype == "float32" else 2
        heads = -(-self.kv_heads // devices)
        wanted = 2 * self.layers * heads * self.size * element * blocks * _BLOCK
        return min(wanted + wanted // 8, 4 * _GIB)
