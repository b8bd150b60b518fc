"""Which requests can never be served. Said before anything is queued, with the numbers that do not fit."""

from __future__ import annotations

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
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"request {request.request_id!r} has token ids {low}..{high}, the model's are 0..{vocab_size - 1}; is this "
            "the model's tokenizer?"
        )


def check_adapter(request: GenerationRequest, adapters: Collection[str] | None) -> None:
    """Raise `DataError` for a request whose adapter is not among `adapters`."""
    if request.adapter is None or (adapters is not None and request.adapter in adapters):
        return
    if adapters is None:
        known = "this replica takes none; the engine 'vllm' does with engine_kwargs.max_loras"
    else:
        known = f"loaded are {', '.join(adapters)}" if adapters else "none is loaded"
    raise DataError(f"request {request.request_id!r} asks for adapter {request.adapter!r}, and {known}")
