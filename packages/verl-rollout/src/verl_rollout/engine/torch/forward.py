"""Running the model over tokens. Most open models share one structure, and for those the pass is written out here.

A transformers model spends much of a small decode step in its modules: masks that nobody needs, seven operations for
one norm, three products where one does. `PlainForward` computes the same function of the same parameters with the
projections joined and nothing in between; `ModelForward` runs any model as it is. Which models are plain is a list of
exact classes, not a guess by attributes: a class that computes something else must never be taken for one of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from verl_rollout.engine.torch.cache import Pass

__all__ = ["Forward", "ModelForward", "PlainForward", "build_forward", "is_plain"]

_log = logging.getLogger(__name__)

_PLAIN = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, and not on the longest sequence so far."""


class Forward(Protocol):
    """One model, run over [n, T] token ids at [n, T] positions; `step` stores keys and values and attends.

    `bind` comes first, and again whenever parameters were given other memory; after `release` nothing is held.
    """

    def bind(self) -> None:
        """Take hold of the parameters. Values are kept, their memory may move."""
        ...

    def release(self) -> None:
        """Let go of the parameters, so that their memory can be freed."""
        ...

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> None:
        """Compute keys and values only."""
        ...

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> torch.Tensor:
        """Return the logits after each row's last token, [n, vocabulary]."""
        ...


def build_forward(model: PreTrainedModel, *, max_length: int) -> Forward:
    """Return the fastest way to run `model` over sequences of up to `max_length` tokens, bound."""
    forward = PlainForward(model, max_length=max_length) if is_plain(model) else ModelForward(model)
    _log.info("%s runs %s", type(forward).__name__, type(model).__name__)
    forward.bind()
    return forward


def is_plain(model: PreTrainedModel) -> bool:
    """Say whether `PlainForward` computes exactly this model."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(model) in _PLAIN
        and rope.get("rope_type") in _FIXED_ROPES
        and "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        and all(type(part) is nn.Linear for part in model.modules() if isinstance(part, nn.Linear))
    )


class ModelForward:
    """The model's own forward, whatever it does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def bind(self) -> None:
        """Nothing to do: the model holds its parameters."""

    def release(self) -> None:
        """Nothing to do."""

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> None:
        """Compute keys and values only."""
        self._model.base_model(input_ids=ids, position_ids=positions, use_cache=False, slots=step)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> torch.Tensor:
        """Return the logits after each row's last token."""
        output = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, slots=step)
        logits: torch.Tensor = output.logits
        return logits[:, -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The tensors of one decoder layer."""

    before_attention: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    before_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class _Norm(Protocol):
    weight: nn.Parameter


class _Attention(Protocol):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    scaling: float


class _NormedAttention(_Attention, Protocol):
    q_norm: _Norm
    k_norm: _Norm


class _Mlp(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: Callable[[torch.Tensor], torch.Tensor]


class _Block(Protocol):
    input_layernorm: _Norm
    self_attn: _Attention | _NormedAttention
    post_attention_layernorm: _Norm
    mlp: _Mlp


class _Base(Protocol):
    """What the plain classes call their parts."""

    embed_tokens: nn.Embedding
    layers: Sequence[_Block]
    norm: _Norm
    rotary_emb: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class PlainForward:
    """Llama and those like it: norm, attention with rotary positions, norm, gated MLP, each with a residual.

    `bind` gives projections of one input one piece of memory, of which the model's parameters become views: what a
    weight sync writes into the parameters is what is multiplied here, and nothing is held twice.
    """

    def __init__(self, model: PreTrainedModel, *, max_length: int) -> None:
        config = model.config
        base = cast("_Base", model.base_model)
        self._base = base
        self._head = cast("nn.Linear", model.get_submodule("lm_head"))
        self._heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._activation = base.layers[0].mlp.act_fn
        self._scaling = base.layers[0].self_attn.scaling
        self._layers: list[_Layer] = []
        weight = base.norm.weight
        cos, sin = base.rotary_emb(weight.new_zeros(1), torch.arange(max_length, device=weight.device)[None])
        half = cos.shape[-1] // 2
        self._head_dim = 2 * half
        self._cos = cos[0, :, None].contiguous()
        self._sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1)

    def bind(self) -> None:
        """Join what is multiplied with the same input."""
        self._layers.clear()
        with torch.inference_mode(mode=False):
            for layer in self._base.layers:
                attention, mlp = layer.self_attn, layer.mlp
                qkv, qkv_bias = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
                gate_up, gate_up_bias = _joined([mlp.gate_proj, mlp.up_proj])
                self._layers.append(
                    _Layer(
                        before_attention=layer.input_layernorm.weight,
                        qkv=qkv,
                        qkv_bias=qkv_bias,
                        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
                        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
                        out=attention.o_proj.weight,
                        out_bias=attention.o_proj.bias,
                        before_mlp=layer.post_attention_layernorm.weight,
                        gate_up=gate_up,
                        gate_up_bias=gate_up_bias,
                        down=mlp.down_proj.weight,
                        down_bias=mlp.down_proj.bias,
                    )
                )

    def release(self) -> None:
        """Drop the joined tensors."""
        self._layers.clear()

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> None:
        """Compute keys and values only."""
        self._hidden(ids, positions, step)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> torch.Tensor:
        """Return the logits after each row's last token."""
        last = self._hidden(ids, positions, step)[:, -1]
        return linear(self._norm(last, self._base.norm.weight), self._head.weight, self._head.bias)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(values, weight.shape, weight, self._eps)

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: Pass) -> torch.Tensor:
        """Return what the last layer makes of each token, [n, T, hidden]."""
        hidden = embedding(ids, self._base.embed_tokens.weight)
        cos, sin = self._cos[positions], self._sin[positions]
        shape = (*ids.shape, -1, self._head_dim)
        rotated = self._heads + self._key_heads
        for index, layer in enumerate(self._layers):
            heads = linear(self._norm(hidden, layer.before_attention), layer.qkv, layer.qkv_bias).view(shape)
            turned = heads[:, :, :rotated]
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = turned.tensor_split([self._heads], dim=2)
                turned = torch.cat([self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)], dim=2)
            turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), sin).transpose(1, 2)
            mixed = step.attend(
                index,
                turned[:, : self._heads],
                turned[:, self._heads :],
                heads[:, :, rotated:].transpose(1, 2),
                self._scaling,
            )
            hidden = hidden + linear(mixed.flatten(2), layer.out, layer.out_bias)
            gate, up = linear(self._norm(hidden, layer.before_mlp), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + linear(self._activation(gate) * up, layer.down, layer.down_bias)
        return hidden


def _joined(parts: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights and biases of all `parts` as one tensor each, and let the parts' own be views of them."""
    weight = _merged([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    return weight, _merged(biases) if biases else None


def _merged(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    pieces = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece
    return whole


if TYPE_CHECKING:

    def _is_plain_forward(x: PlainForward) -> Forward:
        return x

    def _is_model_forward(x: ModelForward) -> Forward:
        return x
