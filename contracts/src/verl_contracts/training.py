"""Training: data in, admission, advantages, losses, the step, and how a mode describes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NewType, Protocol, TypeAlias

from verl_contracts.pickling import cheap_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from verl_contracts.clock import Deadline
    from verl_contracts.events import JsonValue
    from verl_contracts.rollout import PauseMode
    from verl_contracts.runtime import PayloadRef
    from verl_contracts.samples import GroupResult, GroupUid, Prompt, Trajectory
    from verl_contracts.tracking import Metric
    from verl_contracts.weights import WeightSenderHost, WeightSource

__all__ = [
    "AdmissionPolicy",
    "AdvantageEstimator",
    "AdvantageInputs",
    "DataSource",
    "DropReason",
    "ExperienceStore",
    "LossAggregation",
    "ModePlan",
    "Placement",
    "PolicyLoss",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "PolicyWorkers",
    "Schedule",
    "ScheduleRequest",
    "StepContext",
    "StepResult",
    "TrainBatch",
    "TrainEngine",
    "TrainRow",
    "TrainSample",
    "TrainerMode",
]

DropReason = NewType("DropReason", str)
"""Why an admitted group was never trained, for example ``"too few scored samples"``."""

LossAggregation: TypeAlias = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
"""How token losses become one number. The denominator counts over all ranks and micro-batches of one update:
trained tokens; sequences; sequences, each divided by its own trained tokens first."""


class DataSource(Protocol):
    """Prompts in a reproducible order, with a cursor that can be saved. Driven from one task."""

    @property
    def num_rows(self) -> int:
        """Rows in one epoch, unusable ones not counted."""
        ...

    def next(self) -> Prompt | None:
        """Return the next prompt; None when all epochs are over, and ever after."""
        ...

    def state(self) -> Mapping[str, JsonValue]:
        """Return the cursor."""
        ...

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        """Go on from `state`. Raises `DataError` when it belongs to other data."""
        ...


class AdmissionPolicy(Protocol):
    """Decides what may be started and what must be trained, so that no token is staler than the bound. Pure.

    One object serves producer and trainer. A group is outstanding from `admit` to `trained` or `drop`. Steps count from
    1; step t turns version t - 1 into t. Staleness of a token of version v in step s is (s - 1) - v.
    """

    @property
    def step(self) -> int:
        """The next step to train."""
        ...

    def room(self) -> int:
        """Return how many more groups may be admitted now."""
        ...

    def admit(self, uid: GroupUid, /) -> None:
        """Count `uid` as outstanding. Raises `StateError` when there is no room or it was admitted before."""
        ...

    def finish(self, uid: GroupUid, /, *, oldest_version: int) -> bool:
        """Mark `uid` as ready and return True. `oldest_version` is the smallest among its trained tokens.

        Returns False when no step is left that could train it within the bound: it stays outstanding until `drop`.
        """
        ...

    def drop(self, uid: GroupUid, reason: DropReason, /) -> None:
        """Give up on an outstanding group."""
        ...

    def select(self) -> tuple[GroupUid, ...] | None:
        """Return the batch of the next step, or None while it cannot be formed yet. Changes nothing."""
        ...

    def blocking(self) -> tuple[GroupUid, ...]:
        """Return the groups that `select` waits for; empty when it waits for admissions only."""
        ...

    def trained(self, uids: Sequence[GroupUid], /) -> None:
        """Count these groups as trained in step `step`, and go on to the next. They must be what `select` returned.

        Called when the step begins, since selection may change with whatever finishes while it runs; what may be
        admitted stays the same.
        """
        ...

    def acknowledge(self, version: int, /) -> None:
        """Say that every replica that may serve holds at least `version`. Never goes back."""
        ...

    def state(self) -> Mapping[str, JsonValue]:
        """Return everything needed to go on later."""
        ...

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        """Go on from `state`."""
        ...


class ExperienceStore(Protocol):
    """Finished groups between rollout and training. Holds references, not tokens. Driven from one task."""

    def put(self, result: GroupResult, /) -> None:
        """Keep `result`. Raises `StateError` when its uid is there already."""
        ...

    def take(self, uids: Sequence[GroupUid], /) -> tuple[GroupResult, ...]:
        """Remove and return these, in the order asked for. Raises `StateError` naming the missing, removing none."""
        ...

    def discard(self, uid: GroupUid, /) -> None:
        """Forget it. Harmless when it is not there."""
        ...

    def __len__(self) -> int:
        """Return how many groups are held."""
        ...


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """One scored sample, as the driver knows it."""

    uid: str
    """The group; advantages compare rows of one uid."""
    sample: int
    score: float
    payload: PayloadRef
    """A tuple of `Trajectory`."""
    num_tokens: int
    num_trained: int


@cheap_pickle
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one step trains on. Raises ValueError for fewer rows than expected, unless `allow_fewer`."""

    rows: tuple[TrainRow, ...]
    """Sorted by uid and sample."""
    num_groups: int
    expected_rows: int
    """Groups times samples per group."""
    allow_fewer: bool = False
    """Set when the policy for unusable samples is to train the rest."""

    def __post_init__(self) -> None:
        if len(self.rows) > self.expected_rows or (len(self.rows) < self.expected_rows and not self.allow_fewer):
            raise ValueError(f"the step promises {self.expected_rows} rows and has {len(self.rows)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One row with its tokens, as a rank sees it."""

    row: TrainRow
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Where in the run a step is."""

    step: int
    """From 1; the step makes this version."""
    total_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    version: int
    """Equals the step, also when the update was skipped."""
    rows: int
    """Rows that were trained on."""
    updates: int
    """Optimizer steps made; fewer than asked when a gradient was not finite."""
    metrics: tuple[Metric, ...]
    seconds: Mapping[str, float]
    """Part of the step → seconds, on the slowest rank."""


class TrainEngine(Protocol):
    """One rank's policy. Blocking; the ranks of one policy call the same methods in the same order."""

    def log_probs(self, samples: Sequence[TrainSample], /) -> Sequence[torch.Tensor]:
        """Return per trajectory [T] float32: log-prob of each id given those before it, at the sampling temperature.

        Position 0 is 0.
        """
        ...

    def update(self, batch: Sequence[TrainSample], context: StepContext, /) -> StepResult:
        """Do one step on the whole batch: each rank is given all of it and takes its own share."""
        ...

    def weights(self) -> WeightSource:
        """Return the present weights. Iterating is collective."""
        ...

    def save(self, path: str, /) -> None:
        """Write a Hugging Face folder; rank 0 writes, all ranks call."""
        ...


class PolicyWorkers(Protocol):
    """The trainer's ranks as the driver sees them. One step or sync at a time."""

    @property
    def sender_host(self) -> WeightSenderHost:
        """The face of the ranks' weight senders."""
        ...

    async def update(self, batch: TrainBatch, context: StepContext, /, *, deadline: Deadline) -> StepResult:
        """Fetch the payloads and do one step on every rank."""
        ...

    async def save(self, path: str, /, *, deadline: Deadline) -> None:
        """Write the policy as a Hugging Face folder; complete or absent."""
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the ranks. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What advantages are made from. B rows, T positions."""

    scores: torch.Tensor
    """[B] float32."""
    groups: torch.Tensor
    """[B] int64; rows of one group share a number."""
    mask: torch.Tensor
    """[B, T] float32, 1 at trained positions."""


class AdvantageEstimator(Protocol):
    """Turns scores into advantages. Called as ``Class(**options)``; pure."""

    def estimate(self, inputs: AdvantageInputs, /) -> torch.Tensor:
        """Return [B, T] float32, finite, and 0 where the mask is 0.

        An estimator that compares within groups returns exactly 0 for a group of equal scores, so that its rows need
        not be computed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """What a policy loss is made from. All [B, T] float32, of one micro-batch; only `logprobs` carries gradients."""

    logprobs: torch.Tensor
    """Of the present policy."""
    old_logprobs: torch.Tensor
    """Of the policy that the ratio is taken against."""
    advantages: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOutput:
    """Losses by token, and numbers to log."""

    losses: torch.Tensor
    """[B, T]; the caller multiplies by the mask and aggregates by the loss's `aggregation`."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name → [B, T], averaged over trained tokens."""


class PolicyLoss(Protocol):
    """A policy-gradient loss by token. Called as ``Class(**options)``; pure."""

    @property
    def aggregation(self) -> LossAggregation:
        """How the token losses become one number: the denominator that the loss declares."""
        ...

    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        """Return losses by token. A token whose advantage is 0 has no gradient: rows of such tokens may be left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which devices do what. In devices; on CPU a device is one core."""

    trainer_devices: int
    hybrid: bool
    """Whether replicas share the trainer's devices."""
    standalone_devices: int = 0
    """Devices of their own for replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When things happen. Raises ValueError when weights would move too seldom for the bound."""

    max_staleness: int
    """k: most versions that a trained token may be behind."""
    sync_every: int = 1
    """Steps between weight syncs."""
    pause_mode: PauseMode = "wait"
    """What a sync does to sequences that are being decoded."""
    sleep_while_training: bool = False
    """Whether replicas give their memory back during a step."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.sync_every < 1:
            raise ValueError(
                f"max_staleness must be ≥ 0 and sync_every ≥ 1, got {self.max_staleness} and {self.sync_every}"
            )
        if self.sync_every - 1 > self.max_staleness:
            raise ValueError(
                f"sync_every - 1 must be ≤ max_staleness ({self.sync_every} - 1 > {self.max_staleness}); "
                "otherwise the replicas could never make a sample that is fresh enough"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What the user asked of a schedule. None always means: the mode decides."""

    max_staleness: int | None = None
    sync_every: int | None = None
    pause_mode: PauseMode | None = None
    sleep_while_training: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModePlan:
    """A trainer mode, as data."""

    placement: Placement
    schedule: Schedule


class TrainerMode(Protocol):
    """A trainer mode: turns what the user asked for into a plan, or refuses. Called without arguments; pure."""

    def plan(self, *, trainer_devices: int, rollout_devices: int | None, request: ScheduleRequest) -> ModePlan:
        """Return the plan. `rollout_devices` is None when the user asked for none of their own.

        Raises `ConfigError` for what the mode cannot do, naming the key: nothing is changed silently.
        """
        ...
