"""Which requests can never be served. Said before anything is queued, with the numbers that do not fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection

    from verl_contracts.tokens import GenerationRequest

__all__ = ["check_adapter", "check_request"]


def check_request(
    request: GenerationRequest, *, max_model_len: int, vocab_size: int, adapters: Collection[str] | None = None
) -> None:
    """Raise `DataError` for a request that is too long, has no prompt of its own, or uses what there is not.

    These are ids beyond the vocabulary, and an adapter not among `adapters`; None when the engine takes none at all.
    """
    _check_types(request)
    check_adapter(request, adapters)
    length, new = len(request.prompt_ids), request.sampling.max_tokens
    if length + new > max_model_len:
        raise DataError(
            f"request {request.request_id!r} does not fit: {length} prompt tokens + max_tokens {new} > "
            f"max_model_len {max_model_len}; shorten the prompt or lower max_tokens"
        )
    if not 0 <= request.resumed_tokens < length:
        raise DataError(
            f"request {request.request_id!r} has {length} prompt tokens, {request.resumed_tokens} of them resumed; "
            "at least one other is needed"
        )
    stops = request.sampling.stop_token_ids
    low, high = min((*request.prompt_ids, *stops)), max((*request.prompt_ids, *stops))
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"request {request.request_id!r} has token ids {low}..{high}, stop ids included, and the model's are "
            f"0..{vocab_size - 1}; is this the model's tokenizer?"
        )


def _check_types(request: GenerationRequest) -> None:
    """Raise `DataError` for what is no int: an engine would find out in a process where nobody can be told."""
    sampling = request.sampling
    for what, values in (
        ("token id", request.prompt_ids),
        ("stop id", sampling.stop_token_ids),
        ("max_tokens", (sampling.max_tokens,)),
        ("top_k", () if sampling.top_k is None else (sampling.top_k,)),
    ):
        if not all(type(value) is int for value in values):
            wrong: object = next(value for value in values if type(value) is not int)
            raise DataError(
                f"request {request.request_id!r} has the {what} {wrong!r} ({type(wrong).__name__}), and an int is "
                "needed; tolist() makes them of arrays and tensors"
            )
    if not isinstance(request.request_id, str) or not request.request_id.isprintable():
        raise DataError(f"a request id is printable text, not {request.request_id!r}")
    if not math.isfinite(sampling.temperature):
        raise DataError(f"request {request.request_id!r} has the temperature {sampling.temperature}")


def check_adapter(request: GenerationRequest, adapters: Collection[str] | None) -> None:
    """Raise `DataError` for a request whose adapter is not among `adapters`."""
    if request.adapter is None or (adapters is not None and request.adapter in adapters):
        return
    if adapters is None:
        known = "this replica takes none; the engine 'vllm' does with engine_kwargs.max_loras"
    else:
        known = f"loaded are {', '.join(adapters)}" if adapters else "none is loaded"
    raise DataError(f"request {request.request_id!r} asks for adapter {request.adapter!r}, and {known}")
