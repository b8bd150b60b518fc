"""Stand-ins for what surrounds the control core, on virtual time. The core itself is the real one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from verl_contracts.agents import AgentSettings
from verl_contracts.clock import Clock, Deadline
from verl_contracts.errors import ActorFailed, WeightSyncError
from verl_contracts.events import EventSink, JsonValue
from verl_contracts.failures import FailureRecord
from verl_contracts.rollout import LLMClient, Replica, RolloutSettings
from verl_contracts.runtime import DeviceGrant, ObjectSpec, PayloadRef, Runtime
from verl_contracts.samples import FAILED, SCORED, GroupRequest, GroupResult, Prompt, SampleResult
from verl_contracts.tracking import Metric
from verl_contracts.training import StepContext, StepResult, TrainBatch
from verl_contracts.weights import CheckpointSettings, ReplicaSync, SyncReport, WeightSenderHost
from verl_contracts.wrappers import NoOptions

BAD = FailureRecord(
    role="agent", rank=0, node="here", cause="ValueError: x (/loop.py:7 in run)", lines=('File "/loop.py"', "raise x")
)
"""Why samples of bad groups have no score."""


@dataclass(slots=True)
class World:
    """What the stand-ins share: the version served, and how long things take."""

    clock: Clock
    rng: random.Random
    sample_s: Callable[[random.Random], float]
    step_s: Callable[[random.Random], float]
    sync_s: float = 0.1
    updates: int = 1
    """Optimizer steps that each training step says it made."""
    zero_groups: Callable[[int], float] = field(default=lambda step: 0.0)
    """Part of the groups of a step that the workers find no advantage in."""
    served: int | None = None
    """None before the first sync."""
    bad_group: Callable[[GroupRequest], bool] = field(default=lambda request: False)
    dead_group: Callable[[GroupRequest], bool] = field(default=lambda request: False)
    sync_fails: Callable[[int], bool] = field(default=lambda version: False)
    trained: list[tuple[int, str, int]] = field(default_factory=list)
    """(step, uid, oldest version) of each group trained."""


class FakeData:
    """Rows 0, 1, 2, …; ends after `rows` when given."""

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows
        self.row = 0

    @property
    def num_rows(self) -> int:
        return self.rows if self.rows is not None else 1_000_000

    def next(self) -> Prompt | None:
        if self.rows is not None and self.row >= self.rows:
            return None
        self.row += 1
        return Prompt(epoch=0, row=self.row - 1, prompt_ids=(1, 2))

    def state(self) -> Mapping[str, JsonValue]:
        return {"row": self.row}

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        raise AssertionError("not used")


class FakeAgents:
    """Plays each group for a random time; its oldest token has the version served at its start."""

    Config: ClassVar[type] = NoOptions

    def __init__(self, world: World) -> None:
        self.world = world

    @classmethod
    async def create(
        cls,
        settings: AgentSettings,
        /,
        *,
        runtime: Runtime,
        client: ObjectSpec,
        reward: ObjectSpec | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        raise AssertionError("not used")

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        world = self.world
        if world.served is None:
            raise AssertionError("generated before the first sync")
        oldest = world.served
        await world.clock.sleep(world.sample_s(world.rng))
        if world.dead_group(request):
            raise ActorFailed(FailureRecord(role="agent", rank=0, node="here", cause="killed by signal 9"))
        newest = world.served
        bad = world.bad_group(request)
        return GroupResult(
            uid=request.uid,
            samples=tuple(
                SampleResult(
                    index=index,
                    outcome=FAILED if bad else SCORED,
                    score=None if bad else world.rng.random(),
                    payload=None if bad else PayloadRef(num_bytes=0, value=(oldest, str(request.uid))),
                    num_tokens=4,
                    num_trained=2,
                    versions=None if bad else (oldest, newest),
                    failure=BAD if bad else None,
                )
                for index in range(request.n)
            ),
        )

    async def close(self, *, deadline: Deadline) -> None:
        return None


class FakeServers:
    """Remembers who may serve. Groups are played without its replicas, which only tell their status."""

    Config: ClassVar[type] = NoOptions

    def __init__(self, replicas: Sequence[Replica] = ()) -> None:
        self.serving: set[str] = set()
        self.fleet = list(replicas)

    @classmethod
    async def create(
        cls,
        settings: RolloutSettings,
        /,
        *,
        runtime: Runtime,
        grant: DeviceGrant | None,
        start_rank: int | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        raise AssertionError("not used")

    def replicas(self) -> Sequence[Replica]:
        return self.fleet

    def client(self) -> LLMClient:
        raise AssertionError("not used")

    def client_spec(self) -> ObjectSpec:
        raise AssertionError("not used")

    def addresses(self) -> Sequence[str]:
        return ()

    async def add(self, count: int, /, *, deadline: Deadline) -> Sequence[Replica]:
        raise AssertionError("not used")

    async def admit(self, replica_ids: Sequence[str], /) -> None:
        self.serving |= set(replica_ids)

    async def exclude(self, replica_ids: Sequence[str], /) -> None:
        self.serving -= set(replica_ids)

    async def remove(self, replica_ids: Sequence[str], /, *, deadline: Deadline) -> None:
        raise AssertionError("not used")

    async def close(self, *, deadline: Deadline) -> None:
        return None


class FakeCheckpoint:
    """Takes `sync_s` and then serves the version."""

    Config: ClassVar[type] = NoOptions

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[str] = []

    @classmethod
    async def create(
        cls,
        settings: CheckpointSettings,
        /,
        *,
        sender: WeightSenderHost,
        replicas: Sequence[Replica],
        clock: Clock,
        events: EventSink,
    ) -> Self:
        raise AssertionError("not used")

    async def update_weights(self, version: int, /, *, deadline: Deadline) -> SyncReport:
        self.calls.append(f"update {version}")
        await self.world.clock.sleep(self.world.sync_s)
        if self.world.sync_fails(version):
            raise WeightSyncError("transfer", "the receiver raised", missing=("r0",))
        self.world.served = version
        row = ReplicaSync(replica="r0", committed=True, phase="resume")
        return SyncReport(version=version, replicas=(row,), num_bytes=0, seconds={}, digest="", changed=True)

    def versions(self) -> Mapping[str, int | None]:
        return {"r0": self.world.served}

    async def sleep(self, *, deadline: Deadline) -> None:
        self.calls.append("sleep")

    async def wake(self, *, deadline: Deadline) -> None:
        self.calls.append("wake")

    async def add(self, replica: Replica, /) -> None:
        raise AssertionError("not used")

    async def remove(self, replica_id: str, /) -> None:
        raise AssertionError("not used")

    async def close(self, *, deadline: Deadline) -> None:
        return None


class FakeWorkers:
    """Takes `step_s` and remembers what it was given."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def sender_host(self) -> WeightSenderHost:
        raise AssertionError("not used")

    async def update(self, batch: TrainBatch, context: StepContext, /, *, deadline: Deadline) -> StepResult:
        await self.world.clock.sleep(self.world.step_s(self.world.rng))
        seen = set()
        for row in batch.rows:
            value = row.payload.value
            if not isinstance(value, tuple):
                raise TypeError(value)
            if row.uid not in seen:
                seen.add(row.uid)
                self.world.trained.append((context.step, row.uid, value[0]))
        return StepResult(
            version=context.step,
            rows=len(batch.rows),
            updates=self.world.updates,
            metrics=(
                Metric(name="rollout/logprob_diff", value=0.0),
                Metric(name="advantage/zero_groups", value=self.world.zero_groups(context.step)),
            ),
            seconds={},
        )

    async def save(self, path: str, /, *, deadline: Deadline) -> None:
        raise AssertionError("not used")

    async def close(self, *, deadline: Deadline) -> None:
        return None
