"""Samples, from a prompt to a scored group. A group is the unit of admission, of staleness, and of the advantage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

from verl_contracts.pickling import cheap_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.events import JsonValue
    from verl_contracts.failures import FailureRecord
    from verl_contracts.runtime import PayloadRef
    from verl_contracts.tokens import LogprobKind, SamplingParams, VersionSpan

__all__ = [
    "ABSTAINED",
    "FAILED",
    "SCORED",
    "TIMED_OUT",
    "GroupRequest",
    "GroupResult",
    "GroupUid",
    "Message",
    "Outcome",
    "Prompt",
    "SampleResult",
    "Trajectory",
]

Outcome = NewType("Outcome", str)
"""How a sample ended. A failure is never a score of 0."""
SCORED = Outcome("scored")
ABSTAINED = Outcome("abstained")
"""The reward declined to judge; the sample is not trained on."""
TIMED_OUT = Outcome("timed_out")
FAILED = Outcome("failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    content: str


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GroupUid:
    """Names one admission. Two prompts of equal text, and two admissions of one row, have different uids."""

    epoch: int
    """Pass over the data; negative for validation, which is never trained on."""
    row: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}-{self.row}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> GroupUid:
        """Return the uid that `str` made `text` from. Raises ValueError for any other text."""
        epoch, row, attempt = (int(part) for part in text.rsplit("-", 2))
        return cls(epoch=epoch, row=row, attempt=attempt)


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set, tokenized."""

    epoch: int
    row: int
    """Index in the data set, not in the shuffled order."""
    prompt_ids: tuple[int, ...]
    """[P] int; what the first turn continues, chat template applied."""
    messages: tuple[Message, ...] = ()
    """The chat that `prompt_ids` came from; empty when the row was plain text."""
    data_source: str = ""
    """Names the kind of task; rewards are chosen by it."""
    ground_truth: JsonValue = None
    extra_info: Mapping[str, JsonValue] = field(default_factory=dict)


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What is trained on. Everything has one length, T.

    Raises ValueError when the lengths differ, or when a trained token lies in no span.
    """

    ids: tuple[int, ...]
    """[T] int; the engine's own ids, prompt and tool tokens included."""
    loss_mask: tuple[int, ...]
    """[T] 0 or 1; 1 where the policy sampled the token and it may be trained on."""
    logprobs: tuple[float, ...]
    """[T] float; as sampled, 0.0 where the policy did not sample."""
    spans: tuple[VersionSpan, ...]
    """Positions in `ids`; disjoint, in order, covering every position with loss_mask 1."""
    logprob_kind: LogprobKind
    prompt_length: int
    """Tokens before the first sampled one."""
    truncated: bool = False
    """Whether the length budget ended it."""

    def __post_init__(self) -> None:
        length = len(self.ids)
        if len(self.loss_mask) != length or len(self.logprobs) != length:
            raise ValueError(
                f"one length expected: {length} ids, {len(self.loss_mask)} in loss_mask, {len(self.logprobs)} logprobs"
            )
        end = 0
        covered = 0
        for span in self.spans:
            if span.start < end or span.end < span.start or span.end > length:
                raise ValueError(f"spans must be disjoint, in order and within 0..{length}, got {self.spans}")
            end = span.end
            covered += sum(self.loss_mask[span.start : span.end])
        if covered != sum(self.loss_mask):
            raise ValueError(f"{sum(self.loss_mask) - covered} trained tokens lie in no version span")

    @property
    def num_trained(self) -> int:
        """Number of tokens with loss_mask 1."""
        return sum(self.loss_mask)

    def versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest version among trained tokens; None when none is trained."""
        seen = [span.version for span in self.spans if any(self.loss_mask[span.start : span.end])]
        return (min(seen), max(seen)) if seen else None


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One of a group's n samples: how it ended, what the driver needs to know, and where its tokens are."""

    index: int
    """Position within the group, 0..n-1."""
    outcome: Outcome
    score: float | None = None
    """The reward; None unless `outcome` is scored."""
    payload: PayloadRef | None = None
    """A tuple of `Trajectory`, several when the agent restarted its context; None when nothing usable was made."""
    num_tokens: int = 0
    """Length of all trajectories, prompts included."""
    num_trained: int = 0
    """Tokens with loss_mask 1."""
    versions: tuple[int, int] | None = None
    """Oldest and newest version among trained tokens; None when there is none."""
    truncated: bool = False
    num_turns: int = 0
    seconds: float = 0.0
    """From the start of the sample to its score."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers from the agent loop and the reward, averaged into the step's metrics."""
    failure: FailureRecord | None = None
    """Set when `outcome` is failed or timed out."""


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One admitted prompt."""

    uid: GroupUid
    prompt: Prompt
    n: int
    """Samples to make."""
    sampling: SamplingParams
    min_version: int = 0
    """Oldest weight version that may be used."""
    validate: bool = False
    """Whether this is validation, which is never trained on."""


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What became of a `GroupRequest`: n results, in order of index, whatever happened.

    Raises ValueError when indices are not 0..n-1.
    """

    uid: GroupUid
    samples: tuple[SampleResult, ...]

    def __post_init__(self) -> None:
        if [sample.index for sample in self.samples] != list(range(len(self.samples))):
            raise ValueError(f"group {self.uid}: indices must be 0..n-1, got {[s.index for s in self.samples]}")

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among all trained tokens; None when nothing can be trained."""
        seen = [sample.versions[0] for sample in self.samples if sample.versions is not None]
        return min(seen) if seen else None

    @property
    def scored(self) -> tuple[SampleResult, ...]:
        """The samples that can be trained on."""
        return tuple(s for s in self.samples if s.outcome == SCORED and s.payload is not None)
