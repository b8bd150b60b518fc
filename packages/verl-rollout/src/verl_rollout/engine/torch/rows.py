"""The numbers of every sequence that is being decoded, one row each, as arrays: no Python work per row and token.

Row i belongs to slot i of the cache. Active rows are always the first ones, so that a pass runs over a plain slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from verl_rollout.engine.torch.sampling import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    from verl_contracts.tokens import GenerationRequest

__all__ = ["Rows", "Sampling"]

_STOPS = 4
"""Stop ids that a row has room for at first."""
_NO_TOKEN = -1


class Sampling(NamedTuple):
    """Arguments of `choose`, [width] each; None where one would change nothing."""

    u: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.bool_] | None
    temperature: npt.NDArray[np.float32] | None
    top_p: npt.NDArray[np.float32] | None
    top_k: npt.NDArray[np.int64] | None


class Rows:
    """State of up to `count` sequences of up to `max_length` tokens.

    A row knows its first ``known`` tokens: the prompt and what was generated. It has computed keys and values for the
    first ``position`` of them. While ``position + 1 < known`` it replays: the next token is taken, not chosen.
    """

    def __init__(self, count: int, max_length: int) -> None:
        self.tokens: npt.NDArray[np.int64] = np.zeros((count, max_length + 1), dtype=np.int64)
        self.logprobs: npt.NDArray[np.float32] = np.zeros((count, max_length + 1), dtype=np.float32)
        self.position: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.known: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._end: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._turn_start: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._stream: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        self._greedy: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self._temperature: npt.NDArray[np.float32] = np.ones(count, dtype=np.float32)
        self._top_p: npt.NDArray[np.float32] = np.ones(count, dtype=np.float32)
        self._top_k: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._stops: npt.NDArray[np.int64] = np.full((count, _STOPS), _NO_TOKEN, dtype=np.int64)
        self._all = np.arange(count)

    def set(self, row: int, request: GenerationRequest, stream: int) -> None:
        """Begin a sequence in `row`; its `position` is set apart."""
        prompt, sampling = request.prompt_ids, request.sampling
        self.tokens[row, : len(prompt)] = prompt
        self.known[row] = len(prompt)
        self._end[row] = len(prompt) + sampling.max_tokens
        self._turn_start[row] = len(prompt) - request.resumed_tokens
        self._stream[row] = stream
        greedy = self._greedy[row] = sampling.temperature == 0
        self._temperature[row] = 1.0 if greedy else sampling.temperature
        self._top_p[row] = 1.0 if greedy else sampling.top_p
        self._top_k[row] = 0 if greedy else sampling.top_k or 0
        stops = sampling.stop_token_ids
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), _NO_TOKEN, dtype=np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[row] = _NO_TOKEN
        self._stops[row, : len(stops)] = stops

    def move(self, source: int, target: int) -> None:
        """Let `target` become what `source` is."""
        known = self.known[source]
        self.tokens[target, :known] = self.tokens[source, :known]
        self.logprobs[target, :known] = self.logprobs[source, :known]
        for array in (
            self.position,
            self.known,
            self._end,
            self._turn_start,
            self._stream,
            self._greedy,
            self._temperature,
            self._top_p,
            self._top_k,
        ):
            array[target] = array[source]
        self._stops[target] = self._stops[source]

    def inputs(self, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return what the first `width` rows feed to the model: tokens and their positions, [width] each."""
        position = self.position[:width]
        return self.tokens[self._all[:width], position], position

    def sampling(self, width: int) -> Sampling:
        """Return how the next tokens are chosen."""
        greedy, temperature = self._greedy[:width], self._temperature[:width]
        top_p, top_k = self._top_p[:width], self._top_k[:width]
        truncated = bool((top_p < 1).any() or top_k.any())
        return Sampling(
            u=uniforms(self._stream[:width], self.position[:width] + 1 - self._turn_start[:width]),
            greedy=greedy if greedy.any() else None,
            temperature=temperature if bool((temperature != 1).any()) else None,
            top_p=top_p if truncated else None,
            top_k=top_k if truncated else None,
        )

    def advance(
        self, count: int, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> tuple[int, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Take the chosen `ids` of the first `count` rows, [count] each, and move one position on.

        Returns how many tokens are new and, for every row, whether it has ended and whether it chose a stop id.
        """
        rows = self._all[:count]
        following = self.position[:count] + 1
        self.position[:count] = following
        fresh = following >= self.known[:count]
        if not fresh.all():
            ids = np.where(fresh, ids, self.tokens[rows, following])
            logprobs = np.where(fresh, logprobs, self.logprobs[rows, following])
        self.tokens[rows, following] = ids
        self.logprobs[rows, following] = logprobs
        known = np.maximum(following + 1, self.known[:count])
        self.known[:count] = known
        stopped = (ids[:, None] == self._stops[:count]).any(axis=1) & fresh
        ended = (stopped | (known >= self._end[:count])) & fresh
        return int(fresh.sum()), ended, stopped
