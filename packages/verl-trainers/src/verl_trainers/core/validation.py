"""Validation: held-out prompts through the same agents, with sampling of their own, never trained on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline
from verl_contracts.samples import SCORED, GroupRequest, GroupUid
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink
    from verl_contracts.samples import GroupResult, Prompt
    from verl_contracts.tokens import SamplingParams
    from verl_trainers.core.producer import GroupPlayer

__all__ = ["ValidationReport", "Validator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """One validation."""

    version: int
    """Weight version that every serving replica held at least."""
    score: float | None
    """Mean over scored samples; None when none was scored."""
    scored: int
    samples: int
    """Samples asked for; `samples - scored` failed, timed out or abstained."""


class Validator:
    """Plays every held-out prompt once."""

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        agents: GroupPlayer,
        n: int,
        sampling: SamplingParams,
        limit_s: float,
        clock: Clock,
        events: EventSink,
    ) -> None:
        """Play `n` samples of each prompt, within `limit_s` seconds in all."""
        self._prompts = tuple(prompts)
        self._agents = agents
        self._n = n
        self._sampling = sampling
        self._limit_s = limit_s
        self._clock = clock
        self._events = events

    async def run(self, version: int) -> ValidationReport:
        """Validate the weights that are being served."""
        self._events.emit("validate.begin", {"version": version})
        deadline = Deadline.after(self._clock, self._limit_s, setting="trainer.wait_limit_s")
        results = await bounded(
            asyncio.gather(*(self._play(prompt, version, deadline) for prompt in self._prompts)),
            subject=f"validation of version {version}",
            holder="agent-loop manager",
            deadline=deadline,
            clock=self._clock,
        )
        samples = [sample for result in results for sample in result.samples]
        scores = [sample.score for sample in samples if sample.outcome == SCORED and sample.score is not None]
        report = ValidationReport(
            version=version,
            score=sum(scores) / len(scores) if scores else None,
            scored=len(scores),
            samples=len(samples),
        )
        self._events.emit("validate.end", {"version": version, "score": report.score, "scored": report.scored})
        return report

    async def _play(self, prompt: Prompt, version: int, deadline: Deadline) -> GroupResult:
        request = GroupRequest(
            uid=GroupUid(epoch=-1 - version, row=prompt.row),
            prompt=prompt,
            n=self._n,
            sampling=self._sampling,
            min_version=version,
            validate=True,
        )
        return await self._agents.run_group(request, deadline=deadline)
