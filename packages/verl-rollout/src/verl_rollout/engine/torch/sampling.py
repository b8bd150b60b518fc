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
    temperature: torch.Tensor | None,
    top_p: torch.Tensor | None,
    top_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen id and its log-prob for each row: [n] int64 and [n] float32.

    `logits` is [n, V] float32 and `u` [n] float32 in [0, 1). `temperature` is [n], 0 for greedy rows; None means 1
    everywhere. `top_p` and `top_k` are [n], 1 and 0 where nothing is truncated, and None together where no row is.
    A row with NaN gets any id and a log-prob that is not finite. What one row gets does not depend on the others.
    """
    greedy = None
    if temperature is not None:
        greedy = temperature == 0
        logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if top_p is not None and top_k is not None:
        logits = _truncated(logits, top_p, top_k, greedy)
    logprobs = torch.log_softmax(logits, dim=-1)
    cdf = logits.softmax(dim=-1).cumsum_(dim=-1)
    ids = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
    ids.clamp_(max=logits.shape[1] - 1)
    if greedy is not None and bool(greedy.any()):
        ids = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), ids)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]


def _truncated(
    logits: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, greedy: torch.Tensor | None
) -> torch.Tensor:
    """Return logits with -inf outside the k likeliest and, of those, outside the nucleus of mass `top_p`."""
    wanted = (top_p < 1) | (top_k > 0)
    if greedy is not None:
        wanted &= ~greedy
    rows = wanted.nonzero()[:, 0]
    if not len(rows):
        return logits
    ranked, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    k = top_k[rows][:, None]
    beyond_k = (k > 0) & (torch.arange(logits.shape[1]) >= k)
    ranked = ranked.masked_fill(beyond_k, -torch.inf)
    mass = ranked.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    before[:, 0] = 0.0
    nucleus = top_p[rows][:, None]
    ranked = ranked.masked_fill((nucleus < 1) & (before >= nucleus), -torch.inf)
    result = logits.clone()
    result[rows] = torch.empty_like(ranked).scatter_(1, order, ranked)
    return result
