"""What a user may set for the vLLM engine. Imports nothing of vLLM.

What decides whether a run is right, and not only how fast, is not the user's to change here: where the weights come
from, which log-probs come back, that nothing but the request's own stop ids ends a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Final

from verl_contracts.errors import ConfigError
from verl_contracts.plugins import build_config
from verl_contracts.plugins.finding import nearest
from verl_rollout.engine.vllm.builds import known_arguments
from verl_rollout.engine_family import ENGINE_OPTIONS_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["RESERVED", "VLLMOptions", "read_options"]

_LOOPBACK: Final = "127.0.0.1"
_ROLLOUT: Final = "actor_rollout_ref.rollout"
_KEYS: Final[Mapping[str, str]] = {
    "data_parallel_size": "engine_kwargs.data_parallel_size",
    "dtype": "dtype",
    "enable_chunked_prefill": "engine_kwargs.enable_chunked_prefill",
    "enable_lora": "engine_kwargs.max_loras",
    "enable_prefix_caching": "engine_kwargs.enable_prefix_caching",
    "enforce_eager": "engine_kwargs.enforce_eager",
    "gpu_memory_utilization": "engine_kwargs.gpu_memory_utilization",
    "kv_cache_memory_bytes": "engine_kwargs.kv_cache_gib",
    "max_lora_rank": "engine_kwargs.max_lora_rank",
    "max_loras": "engine_kwargs.max_loras",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "engine_kwargs.max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "skip_tokenizer_init": "engine_kwargs.openai_server",
    "stream_interval": "engine_kwargs.report_interval",
    "tensor_parallel_size": "tensor_model_parallel_size",
}
"""Arguments of vLLM that other keys of `actor_rollout_ref.rollout` decide."""
_OURS: Final = frozenset(
    {
        "device_ids",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_elastic_ep",
        "enable_log_requests",
        "enable_sleep_mode",
        "generation_config",
        "load_format",
        "logprobs_mode",
        "model",
        "seed",
        "weight_transfer_config",
    }
)
"""Arguments of vLLM that the engine decides, and those that begin with ``data_parallel_`` too."""
RESERVED: Final = frozenset(_KEYS) | _OURS
"""Arguments of vLLM that `engine_args` refuses."""
_ONE: Final = frozenset({"nnodes", "pipeline_parallel_size", "prefill_context_parallel_size"})
"""Arguments of vLLM that would give a replica more workers than it counts."""
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `max_lora_rank` may be in all supported ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMOptions:
    """`actor_rollout_ref.rollout.engine_kwargs` of the engine `vllm`."""

    gpu_memory_utilization: float = 0.5
    """Share of each GPU that vLLM may take, weights included. Nothing to the CPU build."""
    enforce_eager: bool | None = None
    """Compile and capture nothing; null means only on CPU, where it makes starting quick."""
    enable_prefix_caching: bool = True
    """Compute the prompt of a group once."""
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    data_parallel_size: int = 1
    """Copies of the model inside one replica; the replica's devices are divided among them."""
    kv_cache_gib: float | None = None
    """Cache of each device; null means on a GPU what `gpu_memory_utilization` leaves, on CPU room for `max_num_seqs`
    sequences of `max_model_len` tokens, at most 4 GiB."""
    cpu_cores: tuple[int, ...] | None = None
    """Cores of a replica's vLLM on CPU; null pins replica i to the i-th slice of the cores that its process may use.

    Unpinned replicas are slower than half of one.
    """
    openai_server: bool = False
    """Serve the OpenAI-compatible endpoint, with a bearer token. The model's folder needs a tokenizer then."""
    openai_host: str = _LOOPBACK
    """Address that the endpoint listens at. What comes there is not encrypted."""
    openai_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of `vllm serve` that say how it answers, such as `tool_call_parser` or `chat_template`."""
    max_loras: int = 0
    """LoRA adapters that may be loaded at once; with 0, none, and a request that names one is refused."""
    max_lora_rank: int = 16
    """Highest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512. Room for it is taken for every adapter."""
    report_interval: int = 16
    """Tokens after which vLLM hands over what it has: what is left of a sequence when its engine dies."""
    engine_args: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, as they are."""

    def __post_init__(self) -> None:
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("data_parallel_size", "report_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_loras < 0:
            raise ValueError(f"max_loras must be at least 0, got {self.max_loras}")
        if self.max_lora_rank not in _RANKS:
            raise ValueError(f"max_lora_rank must be one of {', '.join(map(str, _RANKS))}, got {self.max_lora_rank}")
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0.0:
            raise ValueError(f"kv_cache_gib must be more than 0 or null, got {self.kv_cache_gib}")
        if self.openai_args and not self.openai_server:
            raise ValueError("openai_args says how the endpoint answers, and openai_server is false: set it to true")
        if self.openai_host != _LOOPBACK and not self.openai_server:
            raise ValueError(f"openai_host is {self.openai_host}, and openai_server is false: set it to true")
        if refused := list(_refused(self.engine_args)):
            raise ValueError(f"engine_args: {'; '.join(refused)}")


def read_options(given: Mapping[str, object]) -> VLLMOptions:
    """Return `engine_kwargs` as options. Raises `ConfigError` for each that is wrong, and says where it belongs."""
    own = {option.name for option in fields(VLLMOptions)}
    problems = [
        f"{ENGINE_OPTIONS_KEY}.{name}: {_ROLLOUT}.{_KEYS[name]} sets it"
        if name in _KEYS
        else f"{ENGINE_OPTIONS_KEY}.{name}: what vLLM takes besides is written {ENGINE_OPTIONS_KEY}.engine_args.{name}"
        for name in sorted(given)
        if name not in own and (name in _KEYS or (name not in _OURS and name in known_arguments()))
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return build_config(VLLMOptions, given, key=ENGINE_OPTIONS_KEY)


def _refused(arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with further arguments."""
    for name, value in sorted(arguments.items()):
        if name in _KEYS:
            yield f"{name} is set by {_ROLLOUT}.{_KEYS[name]}"
        elif name in _OURS or name.startswith("data_parallel_"):
            yield f"{name} is the engine's own and cannot be set"
        elif name in _ONE and value != 1:
            yield f"{name} must be 1, got {value}: a replica's workers are tensor parallel times data parallel"
        elif (known := known_arguments()) and name not in known:
            yield f"the installed vLLM has no {name}{nearest(name, known)}"
