"""vLLM's outputs as completions, and which weights each token came from. Imports nothing of vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_contracts.tokens import SAMPLED, AbortedCompletion, Completion, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.outputs import CompletionOutput, WeightVersionSpan

    from verl_contracts.tokens import GenerationRequest

__all__ = ["Spans", "Updates", "aborted", "completed", "told_versions"]


@dataclass(slots=True)
class Updates:
    """Which updates computed the cache again, so that a version tells what the cache under it was computed with.

    A request that lives through an update which keeps the cache goes on over keys and values of older weights. Requests
    of different versions share no cached prefix, since the version is part of a prefix's identity.
    """

    version: int | None = None
    resets: list[int] = field(default_factory=list)

    def commit(self, version: int, *, keep_cache: bool) -> None:
        """Note an update."""
        self.version = version
        if not keep_cache:
            self.resets.append(version)

    def kv_version(self, version: int, submitted: int) -> int:
        """Return what the cache of a request submitted at `submitted` was computed with while `version` sampled."""
        return max((reset for reset in self.resets if submitted <= reset <= version), default=submitted)


def told_versions(output: CompletionOutput) -> Sequence[WeightVersionSpan] | None:
    """Return what vLLM tells of the weights of each token; None when it does not, as those before 0.32 never do."""
    told: Sequence[WeightVersionSpan] | None = getattr(output, "weight_versions", None)
    return told


def completed(
    output: CompletionOutput, request: GenerationRequest, spans: Spans, *, replica: str
) -> Completion | AbortedCompletion:
    """Return a sequence that ended by itself; as cut, with nothing, when nobody knows which weights it came from."""
    ids, logprobs = _parts(output)
    found = spans.of(output, len(ids))
    if not found:
        why = "it ended after an update, and this vLLM does not tell which tokens came before"
        return aborted(None, request, spans, replica=replica, reason=why)
    if not math.isfinite(sum(logprobs)):
        raise DataError(
            f"request {request.request_id!r} met a log-prob that is not finite under version {found[-1].version}; the "
            "weights hold NaN or infinite values, or overflow: check the update that made them"
        )
    return Completion(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=logprobs,
        spans=found,
        finish_reason="length" if output.finish_reason == "length" else "stop",
        logprob_kind=SAMPLED,
        replica=replica,
    )


def aborted(
    output: CompletionOutput | None, request: GenerationRequest, spans: Spans, *, replica: str, reason: str
) -> AbortedCompletion:
    """Return what there is of a sequence that was cut; None is nothing."""
    ids, logprobs = ((), ()) if output is None else _parts(output)
    found = () if output is None else spans.of(output, len(ids))
    if not found:
        ids, logprobs = (), ()  # of tokens whose weights nobody knows, none is kept
    return AbortedCompletion(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=logprobs,
        spans=found,
        logprob_kind=SAMPLED,
        replica=replica,
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class Spans:
    """Makes spans for one request."""

    updates: Updates
    submitted: int
    """Version when it was handed to vLLM."""

    def of(self, output: CompletionOutput, count: int) -> tuple[VersionSpan, ...]:
        """Return the spans of `count` tokens; none when vLLM does not say and an update lies between."""
        if count == 0:
            return ()
        if (told := told_versions(output)) is not None:
            parts = [(int(part.version), part.start, min(part.end, count)) for part in told]
        elif self.updates.version == self.submitted:
            parts = [(self.submitted, 0, count)]
        else:
            return ()
        return tuple(
            VersionSpan(
                version=version,
                kv_version=self.updates.kv_version(version, self.submitted),
                start=start,
                end=end,
            )
            for version, start, end in parts
            if start < end
        )


def _parts(output: CompletionOutput) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return ids and log-probs of the sampled tokens."""
    ids = tuple(output.token_ids)
    flat = output.logprobs
    logprobs = () if flat is None else tuple(flat.logprobs)
    if flat is not None and len(flat.start_indices) != len(logprobs):
        # vLLM adds the most likely token where it was not the one sampled; ours is the first of each position.
        logprobs = tuple(flat.logprobs[start] for start in flat.start_indices)
    count = min(len(ids), len(logprobs))
    return ids[:count], logprobs[:count]
