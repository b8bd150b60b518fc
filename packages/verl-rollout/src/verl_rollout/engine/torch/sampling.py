"""Choosing the next token of every row at once, from random numbers that belong to the sample and not to the batch.

A uniform number is a pure function of (seed, uid, sample, turn, position). So a sequence is the same in any slot,
beside any neighbours, and after any interruption, as far as its logits are; nothing has to be saved to resume it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from verl_contracts.tokens import SampleKey

__all__ = ["choose", "stream_of", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_BITS = 23
"""Few enough that ``u * total < total`` holds in float32, so that the inverse CDF never runs off its end."""
_BELOW_ONE = 1.0 - 2.0**-_BITS
_ONE_STAGE = 1024
"""Longest row that is summed in one go."""
_BLOCK = 256


def stream_of(seed: int, key: SampleKey) -> int:
    """Return the 64-bit name of the stream of random numbers of one turn."""
    text = f"{seed}/{key.uid}/{key.sample}/{key.turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def uniforms(streams: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return one number in [0, 1) per row: element `counters` of each stream, by splitmix64."""
    x = streams + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    for shift, factor in _MIX:
        x = (x ^ (x >> shift)) * factor
    x ^= x >> _LAST_SHIFT
    return ((x >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS).astype(np.float32)


def choose(
    logits: torch.Tensor,
    u: torch.Tensor,
    *,
    greedy: torch.Tensor | None,
    temperature: torch.Tensor | None,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen id and its log-prob for each row: [n] int64 and [n] float32.

    `logits` is [n, V] float32 and `u` [n] float32 in [0, 1). Where `greedy`, [n] bool, the likeliest id is taken; None
    means nowhere. `temperature` is [n]; None means 1 everywhere. `top_p` and `top_k` are [n], 1 and 0 where nothing is
    truncated, and None together where no row is. So the caller, who knows, says what need not be computed, and nobody
    waits for a device to find out. A row with NaN gets any id and a log-prob that is not finite. What one row gets
    does not depend on the others.
    """
    if temperature is not None:
        logits = logits / temperature[:, None]
    if top_p is not None and top_k is not None:
        logits = _truncated(logits, top_p, top_k)
    probabilities = logits.softmax(dim=-1)
    ids = _draw(probabilities, u)
    if greedy is not None:
        ids = torch.where(greedy, logits.argmax(dim=-1), ids)
    return ids, probabilities.gather(1, ids[:, None])[:, 0].log_()


def _draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return for each row of `weights` [n, V] the index at which the share `u` of its sum is passed, [n] int64.

    A long row is summed in blocks first, and only the block that is hit is looked into: a running sum over a whole
    vocabulary would cost more than its softmax.
    """
    size = weights.shape[1]
    if size <= _ONE_STAGE:
        return _hit(weights, u)[0]
    whole = size - size % _BLOCK
    sums = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(dim=-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    block, inside = _hit(sums, u)
    places = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    chances = weights.gather(1, places.clamp(max=size - 1)).masked_fill_(places >= size, 0.0)
    return block * _BLOCK + _hit(chances, inside)[0]


def _hit(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the share `u` of each row's sum is passed, and how far into that weight it lies, in [0, 1).

    Sums are float64: one that is made in parallel grows by its rounding also where a weight is 0, and there no share
    must ever fall.
    """
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    goal = u[:, None] * running[:, -1:]
    index = torch.searchsorted(running, goal, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    inside = (goal - running.gather(1, index) + weight) / weight
    return index[:, 0], inside[:, 0].clamp_(0.0, _BELOW_ONE)


def _truncated(logits: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return logits with -inf outside the k likeliest and, of those, outside the nucleus of mass `top_p`."""
    rows = ((top_p < 1) | (top_k > 0)).nonzero()[:, 0]
    ranked, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    k = top_k[rows][:, None]
    beyond_k = (k > 0) & (torch.arange(logits.shape[1], device=logits.device) >= k)
    ranked = ranked.masked_fill(beyond_k, -torch.inf)
    mass = ranked.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    before[:, 0] = 0.0
    nucleus = top_p[rows][:, None]
    ranked = ranked.masked_fill((nucleus < 1) & (before >= nucleus), -torch.inf)
    result = logits.clone()
    result[rows] = torch.empty_like(ranked).scatter_(1, order, ranked)
    return result
