"""One request on its way through vLLM, how long any was on its way, and the condition of the engine meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_rollout.engine.vllm.answers import Updates

if TYPE_CHECKING:
    import asyncio

    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    from verl_contracts.tokens import SamplingParams

__all__ = ["BusyTime", "Condition", "InFlight", "PromptCount", "sampling_parameters", "tells_versions"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One request."""

    admitted: asyncio.Future[None]
    """Done when it may be handed to vLLM; fails when it may not."""
    last: CompletionOutput | None = None
    counted: int = 0
    """Tokens of it that are in the engine's count."""
    reason: str | None = None
    """Why it was cut, if it was."""
    given: bool = False
    """Whether vLLM has it."""
    prompt_tokens: int = 0
    """Length of its prompt, from when that is computed."""
    cached_tokens: int = 0
    """Part of the prompt that vLLM took from its prefix cache."""

    def read_tokens(self, output: RequestOutput) -> int:
        """Note what there is of its answer; return how many tokens are new."""
        (self.last,) = output.outputs
        before, self.counted = self.counted, len(self.last.token_ids)  # a list of vLLM's own, which grows
        return self.counted - before

    def read_prompt(self, output: RequestOutput) -> None:
        """Note what became of its prompt; a first token tells that it is computed."""
        if self.prompt_tokens == 0 and any(part.token_ids for part in output.outputs):
            self.prompt_tokens = len(output.prompt_token_ids or ())
            self.cached_tokens = max(0, output.num_cached_tokens or 0)


@dataclass(slots=True)
class Condition:
    """What an engine may do now."""

    open: bool = True
    """Whether the gate is."""
    quiet: bool = False
    """Whether vLLM has said that it decodes nothing."""
    accepts: bool = False
    """Whether weights were committed before; if so, a request may wait for the next ones."""
    asleep: bool = False
    cache_asleep: bool = False
    updates: Updates = field(default_factory=Updates)


@dataclass(slots=True)
class PromptCount:
    """Prompt tokens of the requests that have ended."""

    tokens: int = 0
    cached: int = 0

    def add(self, flight: InFlight) -> None:
        """Count a request that has ended."""
        self.tokens += flight.prompt_tokens
        self.cached += flight.cached_tokens


@dataclass(slots=True)
class BusyTime:
    """Seconds in which something ran."""

    seconds: float = 0.0
    since: float | None = None

    def set(self, busy: bool) -> None:
        """Note that from now on the engine computes, or does not."""
        now = time.perf_counter()
        if self.since is not None:
            self.seconds += now - self.since
        self.since = now if busy else None

    def total(self) -> float:
        """Return the seconds until now."""
        return self.seconds + (time.perf_counter() - self.since if self.since is not None else 0.0)


def tells_versions() -> bool:
    """Return whether the installed vLLM says which weights each token came from."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


def sampling_parameters(sampling: SamplingParams, interval: int) -> VLLMSamplingParams:
    """Return vLLM's parameters: the request's own stop ids and nothing else ends a sequence; log-probs as sampled."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    return VLLMSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0 if sampling.top_k is None else sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        stream_interval=interval,
    )
