"""Loading a policy, giving it the type it computes in, and sharding it over ranks.

Owns where master weights are. Always float32: with one rank and a narrower compute type they are a list beside the
model, which then holds a narrow copy; in every other case they are the model's own parameters (FSDP2 casts on the way
in). Adding small updates to bfloat16 weights would lose most of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["DTYPES", "load_model", "narrow_parameters", "reshard_model", "shard_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Names that configs use → torch's types."""


def load_model(path: str, *, trust_remote_code: bool, device: torch.device) -> PreTrainedModel:
    """Return the model of a Hugging Face folder in float32, in evaluation mode: dropout would move the ratio off 1."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"actor_rollout_ref.model.path: no causal language model in {path!r}; name a folder with config.json "
            f"and safetensors files ({exc})"
        ) from exc
    model.to(device)  # type: ignore[arg-type]  # transformers narrows what `to` accepts
    model.eval()  # type: ignore[no-untyped-call]
    return model


def narrow_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place. Buffers stay: rotary frequencies in bfloat16 would blur far positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def shard_model(model: PreTrainedModel, *, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Shard in place over all ranks: each transformer block is a unit of its own, the rest is one more."""
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    blocks = _block_classes(model)
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def reshard_model(model: nn.Module) -> None:
    """Give back what a forward pass gathered and no backward pass will need. Nothing to do when it is not sharded."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _block_classes(model: PreTrainedModel) -> frozenset[str]:
    """Return the class names of modules that transformers says must not be split: its blocks."""
    named: object = model._no_split_modules
    return frozenset(str(name) for name in named) if isinstance(named, Iterable) else frozenset()
