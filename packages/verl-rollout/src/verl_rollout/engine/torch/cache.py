"""Keys and values of all slots, and the attention that reads them.

Transformers hands every attention call of the model to `attend`, registered under `ATTENTION`; the running pass (a
`Decode` or `Prefill`) travels there as a keyword of the model call. So the model needs no cache class and builds no
mask, and rows of different lengths share a batch without padding on the left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ATTENTION", "BlockDecode", "Decode", "KVCache", "Pass", "Prefill", "attend"]

ATTENTION = "verl_slots"
"""Name under which `attend` is registered with transformers."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Keywords of attention variants that would be computed wrongly; refused unless absent."""
_FIRST_LENGTH = 64


class KVCache:
    """One tensor, [layers, 2, slots + 1, heads, length, head_dim]; the last slot is scratch for rows that are no one's.

    `length` doubles when it is used up, so memory follows the longest sequence seen and not the longest allowed one.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
    ) -> None:
        self.max_length = max_length
        self.scratch = slots
        self.zero = torch.zeros((), dtype=dtype, device=device)
        self.minus_infinity = torch.full_like(self.zero, -torch.inf)
        self._hold(
            torch.zeros(
                (layers, 2, slots + 1, heads, min(_FIRST_LENGTH, max_length), head_dim), dtype=dtype, device=device
            )
        )

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        self.indices = torch.arange(max(data.shape[2], data.shape[4]), device=data.device)
        """0, 1, …: as many as there are slots or positions, whichever are more."""

    @property
    def length(self) -> int:
        """Positions that each slot has room for."""
        return self.data.shape[4]

    def ensure(self, length: int) -> None:
        """Make room for `length` positions in each slot."""
        old = self.length
        if length <= old:
            return
        new = old
        while new < length:
            new *= 2
        shape = list(self.data.shape)
        shape[4] = max(length, min(new, self.max_length))
        data = self.data.new_zeros(shape)
        data[:, :, :, :, :old] = self.data
        self._hold(data)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of one slot to others."""
        self.data[:, :, list(targets), :, :length] = self.data[:, :, source : source + 1, :, :length]

    def clear(self, slot: int) -> None:
        """Forget what a slot holds. Masked positions count as 0 times their value, which NaN would survive."""
        self.data[:, :, slot] = 0


class Pass(Protocol):
    """One run of the model: stores what a layer computed, and attends."""

    @property
    def max_length(self) -> int:
        """Most tokens that a sequence may ever have; a model with a shorter window is refused."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Take [n, heads, T, head_dim] each and return [n, T, heads, head_dim]."""
        ...


class Decode:
    """One token for each of the first n slots: row i writes position ``positions[i]`` of slot i and sees up to it."""

    def __init__(self, cache: KVCache, positions: torch.Tensor, *, length: int) -> None:
        self.max_length = cache.max_length
        self._data = cache.data
        self._rows = cache.indices[: len(positions)]
        self._positions = positions
        self._length = length
        hidden = cache.indices[:length] > positions[:, None]
        self._bias = torch.where(hidden, cache.minus_infinity, cache.zero)[:, None, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store one position per row and attend. Query heads that share a key head are rows of one small matrix."""
        keys, values = self._data[layer].unbind(0)
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        n, heads, _, head_dim = query.shape
        grouped = query.reshape(n, keys.shape[1], -1, head_dim)
        result = self._mix(grouped, keys[:n, :, : self._length], values[:n, :, : self._length], scaling)
        return result.reshape(n, 1, heads, head_dim)

    def _mix(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Take [n, key heads, query heads of each, head_dim] and [n, key heads, length, head_dim]."""
        if query.dtype != torch.float32:
            # Scores of lower precision must not be rounded before the softmax.
            return scaled_dot_product_attention(query, keys, values, attn_mask=self._bias, scale=scaling)
        scores = torch.matmul(query * scaling, keys.transpose(2, 3)).add_(self._bias)
        return torch.matmul(scores.softmax(dim=-1), values)


class BlockDecode(Decode):
    """A `Decode` whose bits do not depend on `length`, and so not on the longest neighbour.

    Kernels choose their order of summation by shape: with any alignment, longer keys were measured to change bits of
    some model's shorter rows. Here every product has the shape of one block, maxima are exact, and a block that a row
    does not see adds zeros.
    """

    def __init__(self, cache: KVCache, positions: torch.Tensor, *, length: int, block: int) -> None:
        if length % block:
            raise ValueError(f"length must be a multiple of block, got {length} and {block}")
        super().__init__(cache, positions, length=length)
        self._block = block

    def _mix(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        blocks = [slice(start, start + self._block) for start in range(0, self._length, self._block)]
        scores = [
            torch.matmul(query, keys[:, :, block].transpose(2, 3)).float().mul_(scaling).add_(self._bias[..., block])
            for block in blocks
        ]
        highest = torch.stack([score.amax(dim=-1, keepdim=True) for score in scores]).amax(dim=0)
        weights = [(score - highest).exp_() for score in scores]
        total = weights[0].sum(dim=-1, keepdim=True)
        result = torch.matmul(weights[0].to(values.dtype), values[:, :, blocks[0]]).float()
        for weight, block in zip(weights[1:], blocks[1:], strict=True):
            total += weight.sum(dim=-1, keepdim=True)
            result += torch.matmul(weight.to(values.dtype), values[:, :, block])
        return (result / total).to(values.dtype)


class Prefill:
    """T tokens for each of some slots, from position `start` on. Earlier positions of these slots are seen too."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, *, start: int, tokens: int) -> None:
        self.max_length = cache.max_length
        self._data = cache.data
        self._slots = slots
        self._start = start
        self._end = start + tokens
        positions = cache.indices[: self._end]
        seen = positions <= positions[start:, None]
        self._mask = seen[None, None] if start else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store T positions per row and attend causally; what lies right of a row's end is junk that nobody reads."""
        stored = self._data[layer]
        stored[0, self._slots, :, self._start : self._end] = key
        stored[1, self._slots, :, self._start : self._end] = value
        if self._start:
            key, value = stored[:, self._slots, :, : self._end].unbind(0)
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return result.transpose(1, 2)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slots: Pass,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Serve one attention call of a transformers model, in transformers' own calling convention."""
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(f"the embedded engine has no attention with {name!r}, which this model uses; take vllm")
    window = options.get("sliding_window")
    if isinstance(window, int) and window < slots.max_length:
        raise ConfigError(
            f"the embedded engine has no sliding-window attention: window {window} < max_model_len "
            f"{slots.max_length}; lower max_model_len or take vllm"
        )
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise ConfigError(f"attention module {type(module).__name__} has no layer_idx; take vllm for this model")
    return slots.attend(layer, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
