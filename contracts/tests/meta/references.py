"""The shortest implementations that meet a contract. Each is certified by its suite, then broken one rule at a time."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_contracts.errors import NoHealthyReplica, StateError, WaitTimeout
from verl_contracts.failures import FailureRecord
from verl_contracts.rewards import RewardRequest, RewardResult
from verl_contracts.rollout import FAILURE, BalancerRow, Lease
from verl_contracts.runtime import ActorContext, PayloadRef
from verl_contracts.samples import (
    ABSTAINED,
    FAILED,
    SCORED,
    TIMED_OUT,
    GroupResult,
    GroupUid,
    SampleResult,
    Trajectory,
)
from verl_contracts.testing.scripted_agents import ScriptedClient, ScriptedReward
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey
from verl_contracts.training import DropReason
from verl_contracts.waits import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.events import JsonValue
    from verl_contracts.rollout import LeaseOutcome, LoadBalancer
    from verl_contracts.samples import GroupRequest
    from verl_contracts.training import (
        AdmissionPolicy,
        ExperienceStore,
    )


class Admission:
    def __init__(self, *, max_staleness: int, batch_groups: int) -> None:
        self.k, self.batch = max_staleness, batch_groups
        self.t, self.a = 1, 0
        self.deadlines: dict[GroupUid, int] = {}
        self.ready: set[GroupUid] = set()

    @property
    def step(self) -> int:
        return self.t

    def room(self) -> int:
        return max(0, (self.k + self.a + 2 - self.t) * self.batch - len(self.deadlines))

    def admit(self, uid: GroupUid, /) -> None:
        if self.room() == 0 or uid in self.deadlines:
            raise StateError(f"cannot admit {uid}")
        self.deadlines[uid] = 1 + self.k + self.a

    def finish(self, uid: GroupUid, /, *, oldest_version: int) -> bool:
        self._check(uid)
        self.deadlines[uid] = 1 + self.k + oldest_version
        if self.deadlines[uid] < self.t:
            return False
        self.ready.add(uid)
        return True

    def drop(self, uid: GroupUid, reason: DropReason, /) -> None:
        self._check(uid)
        del self.deadlines[uid]
        self.ready.discard(uid)

    def order(self) -> list[GroupUid]:
        return sorted(self.ready, key=lambda uid: (self.deadlines[uid], uid))

    def feasible(self, batch: Sequence[GroupUid]) -> bool:
        left = [deadline for uid, deadline in self.deadlines.items() if uid not in batch]
        return all(sum(d <= s for d in left) <= max(0, s - self.t) * self.batch for s in left)

    def select(self) -> tuple[GroupUid, ...] | None:
        batch = self.order()[: self.batch]
        return tuple(batch) if len(batch) == self.batch and self.feasible(batch) else None

    def blocking(self) -> tuple[GroupUid, ...]:
        batch = self.order()[: self.batch]
        left = {uid: d for uid, d in self.deadlines.items() if uid not in batch}
        full = [s for s in left.values() if sum(d <= s for d in left.values()) > max(0, s - self.t) * self.batch]
        limit = min(full) if full else max(left.values(), default=0)
        return tuple(sorted(uid for uid, d in left.items() if uid not in self.ready and d <= limit))

    def trained(self, uids: Sequence[GroupUid], /) -> None:
        if sorted(uids) != sorted(self.select() or ()) or not uids:
            raise StateError(f"not the batch of step {self.t}: {uids}")
        for uid in uids:
            self.drop(uid, _TRAINED)
        self.t += 1

    def acknowledge(self, version: int, /) -> None:
        self.a = max(self.a, version)

    def state(self) -> Mapping[str, JsonValue]:
        return {
            "t": self.t,
            "a": self.a,
            "groups": [[str(uid), deadline, uid in self.ready] for uid, deadline in self.deadlines.items()],
        }

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        t, a, groups = state["t"], state["a"], state["groups"]
        assert isinstance(t, int)
        assert isinstance(a, int)
        assert isinstance(groups, list)
        self.t, self.a = t, a
        self.deadlines = {GroupUid.parse(uid): deadline for uid, deadline, _ in groups}
        self.ready = {GroupUid.parse(uid) for uid, _, ready in groups if ready}

    def _check(self, uid: GroupUid) -> None:
        if uid not in self.deadlines:
            raise StateError(f"{uid} is not outstanding")


class Store:
    def __init__(self) -> None:
        self.groups: dict[GroupUid, GroupResult] = {}

    def put(self, result: GroupResult, /) -> None:
        if result.uid in self.groups:
            raise StateError(f"{result.uid} is there already")
        self.groups[result.uid] = result

    def take(self, uids: Sequence[GroupUid], /) -> tuple[GroupResult, ...]:
        missing = [str(uid) for uid in uids if uid not in self.groups]
        if missing:
            raise StateError(f"missing: {missing}")
        return tuple(self.groups.pop(uid) for uid in uids)

    def discard(self, uid: GroupUid, /) -> None:
        self.groups.pop(uid, None)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass
class Member:
    epoch: int
    capacity: int
    state: Literal["active", "draining", "quarantined"] = "active"
    in_flight: int = 0
    turn: int = 0


class Balancer:
    """Polls, since it need not be quick: waiting calls are served in order because only the first one looks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.members: dict[str, Member] = {}
        self.leases: dict[int, Lease] = {}
        self.sticky: dict[str, str] = {}
        self.queue: list[object] = []
        self.epochs: dict[str, int] = {}
        self.numbers = itertools.count()

    def active(self) -> dict[str, Member]:
        return {name: member for name, member in self.members.items() if member.state == "active"}

    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        ticket = object()
        self.queue.append(ticket)
        try:
            while True:
                if not self.active():
                    raise NoHealthyReplica(f"of {sorted(self.epochs)} none may serve")
                free = sum(member.capacity - member.in_flight for member in self.active().values())
                if self.queue[0] is ticket and free >= n:
                    return tuple(self.grant(key) for key in keys)
                if deadline.remaining(self.clock) == 0.0:
                    raise WaitTimeout(f"{n} leases", "those who hold them", deadline.limit_s)
                await self.clock.sleep(0.001)
        finally:
            self.queue.remove(ticket)

    def choose(self, key: str | None) -> str:
        free = {name: m for name, m in self.active().items() if m.in_flight < m.capacity}
        if key is not None and self.sticky.get(key) in free:
            return self.sticky[key]
        return min(free, key=lambda name: (free[name].in_flight, free[name].turn))

    def grant(self, key: str | None) -> Lease:
        name = self.choose(key)
        member, number = self.members[name], next(self.numbers)
        member.in_flight += 1
        member.turn = number + 1
        if key is not None:
            self.sticky[key] = name
        lease = Lease(lease_id=number, replica=name, epoch=member.epoch)
        self.leases[number] = lease
        return lease

    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /) -> None:
        for lease in leases:
            if self.leases.pop(lease.lease_id, None) is None:
                continue
            member = self.members[lease.replica]
            member.in_flight -= 1
            if outcome == FAILURE:
                member.state = "quarantined"

    async def add(self, replica: str, /, *, capacity: int) -> None:
        await self.remove(replica)
        self.epochs[replica] = self.epochs.get(replica, 0) + 1
        self.members[replica] = Member(epoch=self.epochs[replica], capacity=capacity)

    async def drain(self, replica: str, /, *, deadline: Deadline) -> None:
        member = self.members[replica]
        member.state = "draining"
        while member.in_flight:
            if deadline.remaining(self.clock) == 0.0:
                raise WaitTimeout(f"drain of {replica}", "its leases", deadline.limit_s)
            await self.clock.sleep(0.001)

    async def remove(self, replica: str, /) -> None:
        self.members.pop(replica, None)
        self.leases = {number: lease for number, lease in self.leases.items() if lease.replica != replica}

    async def snapshot(self) -> tuple[BalancerRow, ...]:
        return tuple(
            BalancerRow(replica=name, epoch=m.epoch, capacity=m.capacity, in_flight=m.in_flight, state=m.state)
            for name, m in self.members.items()
        )


class Agents:
    """Plays in this process. `Config` and `create` belong to the plug-in, not to what the suite tests."""

    def __init__(
        self, *, context: ActorContext, client: ScriptedClient, reward: ScriptedReward | None, sample_limit_s: float
    ) -> None:
        self.context = context
        self.client = client
        self.reward = reward
        self.sample_limit_s = sample_limit_s
        self.closed = False

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        if self.closed:
            raise StateError("closed")
        samples = await asyncio.gather(*(self.sample(request, index, deadline) for index in range(request.n)))
        return GroupResult(uid=request.uid, samples=tuple(samples))

    async def sample(self, request: GroupRequest, index: int, deadline: Deadline) -> SampleResult:
        limit = deadline.within(self.context.clock, self.sample_limit_s)
        try:
            return await bounded(
                self.play(request, index, limit),
                subject="sample",
                holder="client",
                deadline=limit,
                clock=self.context.clock,
            )
        except Exception as exc:
            return self.failed(exc, index)

    def failed(self, exc: Exception, index: int) -> SampleResult:
        record = FailureRecord.from_exception(exc, role="agent", rank=0)
        outcome = TIMED_OUT if isinstance(exc, WaitTimeout) else FAILED
        return SampleResult(index=index, outcome=outcome, failure=record)

    async def play(self, request: GroupRequest, index: int, limit: Deadline) -> SampleResult:
        prompt = request.prompt.prompt_ids
        done = await self.client.generate(
            GenerationRequest(
                request_id=f"{request.uid}/{index}",
                prompt_ids=prompt,
                sampling=request.sampling,
                key=SampleKey(uid=str(request.uid), sample=index, turn=0),
            ),
            deadline=limit,
        )
        assert isinstance(done, Completion)
        trajectory = Trajectory(
            ids=prompt + done.token_ids,
            loss_mask=(0,) * len(prompt) + (1,) * len(done.token_ids),
            logprobs=(0.0,) * len(prompt) + done.logprobs,
            spans=tuple(span.shifted(len(prompt)) for span in done.spans),
            logprob_kind=done.logprob_kind,
            prompt_length=len(prompt),
        )
        verdict = RewardResult(outcome=ABSTAINED)
        if self.reward is not None:
            verdict = await self.reward.score(self.question(request, index, done), deadline=limit)
        return SampleResult(
            index=index,
            outcome=verdict.outcome,
            score=verdict.score,
            payload=PayloadRef(num_bytes=0, value=(trajectory,)),
            num_tokens=len(trajectory.ids),
            num_trained=trajectory.num_trained,
            versions=trajectory.versions(),
        )

    def question(self, request: GroupRequest, index: int, done: Completion) -> RewardRequest:
        return RewardRequest(
            uid=str(request.uid),
            sample=index,
            data_source=request.prompt.data_source,
            response_ids=done.token_ids,
            ground_truth=request.prompt.ground_truth,
        )

    async def close(self, *, deadline: Deadline) -> None:
        self.closed = True


class Length:
    """A reward: the share of the ground truth's characters that the response has."""

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        wanted = str(request.ground_truth)
        hits = sum(a == b for a, b in zip(response, wanted, strict=False))
        return RewardResult(outcome=SCORED, score=hits / len(wanted))


_TRAINED = DropReason("trained")

if TYPE_CHECKING:

    def _is_admission(x: Admission) -> AdmissionPolicy:
        return x

    def _is_store(x: Store) -> ExperienceStore:
        return x

    def _is_balancer(x: Balancer) -> LoadBalancer:
        return x
