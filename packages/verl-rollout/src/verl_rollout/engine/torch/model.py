"""The model without its values: shapes from a Hugging Face folder, parameters empty until a weight sync fills them."""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_contracts.errors import ConfigError
from verl_rollout.engine.torch.cache import ATTENTION, KVCache, attend

if TYPE_CHECKING:
    from verl_contracts.rollout import RolloutSettings

__all__ = ["Shape", "allocate", "build_model", "release"]

_log = logging.getLogger(__name__)

_VECTOR = 32
"""Elements per turn of a vectorized loop. What is left over at a tensor's end is computed by other instructions, whose
bits differ (measured for SiLU), so a tensor whose bits must not depend on the row has no left-over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a KV cache needs to know of a model."""

    layers: int
    heads: int
    """Key and value heads."""
    head_dim: int
    vocab_size: int
    device: torch.device
    """Where the parameters are, and the cache belongs."""
    row_unit: int
    """In deterministic mode the rows of a pass are a multiple of this. See `_VECTOR`."""

    def build_cache(self, *, slots: int, dtype: torch.dtype, max_length: int) -> KVCache:
        """Return an empty cache."""
        return KVCache(
            layers=self.layers,
            slots=slots,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=dtype,
            device=self.device,
            max_length=max_length,
        )


def build_model(settings: RolloutSettings) -> tuple[PreTrainedModel, Shape]:
    """Return the model of `settings.model_path` with empty parameters, and its shape. Draws no random numbers.

    Raises `ConfigError` for a model whose attention the engine cannot serve, and for a device that is not there.
    """
    device = _device(settings)
    try:
        config = AutoConfig.from_pretrained(settings.model_path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model_path {settings.model_path!r} is not a folder with a model config: {exc}") from exc
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"the embedded engine serves attention layers only, not {sorted(layer_types)}; take vllm")
    AttentionInterface.register(ATTENTION, attend)
    with torch.device("meta"):
        # Always float32: any other type would be made the default of the whole process while the model is built, and
        # another thread that builds one meanwhile would get it too.
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=ATTENTION
        )
    if not isinstance(model, PreTrainedModel) or not model._supports_attention_backend:
        raise ConfigError(f"{type(model).__name__} does not take an attention of ours; take vllm for this model")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, settings.dtype))
    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)  # type: ignore[no-untyped-call]
    model.requires_grad_(False).train(mode=False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (head_dim, config.hidden_size, getattr(config, "intermediate_size", None) or 1)
    shape = Shape(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        device=device,
        row_unit=_VECTOR // math.gcd(_VECTOR, *sizes),
    )
    _log.info("built %s with %d parameters, empty", type(model).__name__, model.num_parameters())
    return model, shape


def _device(settings: RolloutSettings) -> torch.device:
    """Return the device that `settings` mean in this process."""
    if settings.deterministic and settings.device == "cuda":
        raise ConfigError("deterministic=true needs device=cpu: on cuda no order of summation is fixed")
    found = torch.cuda.is_available()
    if settings.device == "cuda" and not found:
        raise ConfigError("device is cuda, and torch sees no GPU in this process; give its bundle GPUs, or set cpu")
    return torch.device("cuda" if found and settings.device != "cpu" and not settings.deterministic else "cpu")


def release(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Give every parameter's memory back to the system; return what `allocate` needs to bring it back."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    _trim()
    return shapes


def _trim() -> None:
    """Hand back what allocators keep of freed memory: torch's on a GPU, and glibc's, which can be all of it."""
    torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allocate(model: PreTrainedModel, shapes: dict[str, torch.Size]) -> None:
    """Give every parameter memory again, with undefined values. Tied parameters stay tied."""
    with torch.inference_mode(mode=False):
        for name, parameter in model.named_parameters():
            parameter.data = torch.empty(shapes[name], dtype=parameter.dtype, device=parameter.device)
