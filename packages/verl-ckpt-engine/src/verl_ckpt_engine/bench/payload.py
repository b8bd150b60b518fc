"""Weights of a made-up model, as a trainer offers them and as an engine takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from verl_contracts.weights import LoadReport, Manifest, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from verl_contracts.weights import WeightSource, WeightTarget

__all__ = ["Weights", "make_weights", "shapes_for"]

_HIDDEN: Final = 576
_LAYER: Final = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_HIDDEN // 3, _HIDDEN),
    "self_attn.v_proj": (_HIDDEN // 3, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (1536, _HIDDEN),
    "mlp.up_proj": (1536, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, 1536),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
}
_EMBEDDING: Final = 49152


class Weights:
    """Tensors in memory that exists: a source, and a target of the same names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.held = tensors

    def manifest(self, version: int, /) -> Manifest:
        """Describe them."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.held.values())
        return Manifest(version=version, tensors=tuple(meta for meta, _ in self.tensors()), num_bytes=size)

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield them."""
        for name, tensor in self.held.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield TensorMeta(name=name, shape=tuple(tensor.shape), dtype=dtype), tensor

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        """Copy everything in."""
        for meta, tensor in items:
            self.held[meta.name].copy_(tensor)
        return LoadReport(loaded=tuple(self.held))


def shapes_for(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of bfloat16 that come to about `num_bytes`: 269 MB are SmolLM2-135M, more have more layers."""
    layer_bytes = 2 * sum(torch.Size(shape).numel() for shape in _LAYER.values())
    rest = num_bytes - 2 * _EMBEDDING * _HIDDEN
    layers = max(1, round(max(0, rest) / layer_bytes))
    rows = _EMBEDDING if rest > 0 else max(1, (num_bytes - layer_bytes) // (2 * _HIDDEN))
    return {
        "model.embed_tokens.weight": (rows, _HIDDEN),
        **{f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in _LAYER.items()},
        "model.norm.weight": (_HIDDEN,),
    }


def make_weights(num_bytes: int, *, seed: int) -> Weights:
    """Return random weights of about `num_bytes`, their pages touched."""
    generator = torch.Generator().manual_seed(seed)
    return Weights(
        {
            name: torch.randint(0, 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
            for name, shape in shapes_for(num_bytes).items()
        }
    )


if TYPE_CHECKING:

    def _is_source(x: Weights) -> WeightSource:
        return x

    def _is_target(x: Weights) -> WeightTarget:
        return x
