"""For each rule a broken implementation, and the test of the kit that must reject it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from broken import Broken, name_of, reject
from references import Admission, Agents, Balancer, Length, Store
from subjects import (
    AdmissionSubject,
    AgentsSubject,
    BalancerSubject,
    ReplicaSubject,
    RewardSubject,
    RuntimeSubject,
    StoreSubject,
)

from verl_contracts.errors import ActorFailed, NoHealthyReplica, StateError
from verl_contracts.rewards import RewardResult
from verl_contracts.rollout import FAILURE, SUCCESS, Lease, ReplicaStatus
from verl_contracts.runtime import DeviceGrant
from verl_contracts.samples import SCORED, GroupResult, GroupUid, SampleResult
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.scripted import ScriptedReplica
from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.events import JsonValue
    from verl_contracts.rewards import RewardRequest
    from verl_contracts.rollout import LeaseOutcome, PauseMode
    from verl_contracts.runtime import ActorRef, ActorSpec, PlacementRequest
    from verl_contracts.samples import GroupRequest
    from verl_contracts.training import DropReason

MACHINE = "test_every_order_of_events_keeps_the_bound"
TWO_BY_ONE = {"max_staleness": 2, "batch_groups": 1}


class CountsOnly(Admission):
    def feasible(self, batch: Sequence[GroupUid]) -> bool:
        return True


class NewestFirst(Admission):
    def order(self) -> list[GroupUid]:
        return sorted(self.ready, reverse=True)


class TakesWhatIsReadyFirst(CountsOnly, NewestFirst):
    pass


class OneStepTooLate(Admission):
    def finish(self, uid: GroupUid, /, *, oldest_version: int) -> bool:
        return super().finish(uid, oldest_version=oldest_version + 1)


class WaitsForEverything(Admission):
    def select(self) -> tuple[GroupUid, ...] | None:
        return super().select() if self.ready == set(self.deadlines) else None


class AdmitsWithoutWeights(Admission):
    def room(self) -> int:
        return max(0, (self.k + 1) * self.batch - len(self.deadlines))


class KeepsDropped(Admission):
    def drop(self, uid: GroupUid, reason: DropReason, /) -> None:
        self._check(uid)
        self.ready.discard(uid)


class TrainsTwice(Admission):
    def trained(self, uids: Sequence[GroupUid], /) -> None:
        self.t += 1


class ForgetsReady(Admission):
    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        super().restore(state)
        self.ready.clear()


class NeverRefuses(Admission):
    def admit(self, uid: GroupUid, /) -> None:
        self.deadlines[uid] = 1 + self.k + self.a


ADMISSION = [
    Broken(
        kind=CountsOnly,
        test="test_a_b_c_d_two_groups_are_never_due_in_one_step_of_one",
        says="D now would leave A and C",
    ),
    Broken(
        kind=TakesWhatIsReadyFirst, test=MACHINE, says="behind in step|standstill|yet no step", parameters=TWO_BY_ONE
    ),
    Broken(kind=NewestFirst, test=MACHINE, says="standstill|behind in step|yet no step", parameters=TWO_BY_ONE),
    Broken(kind=OneStepTooLate, test="test_group_that_no_step_can_train_is_refused", says="would be 1 behind"),
    Broken(
        kind=WaitsForEverything,
        test="test_a_b_c_d_two_groups_are_never_due_in_one_step_of_one",
        says="nothing is due in step 1",
    ),
    Broken(kind=AdmitsWithoutWeights, test="test_room_grows_only_when_weights_arrive", says="serves nowhere yet"),
    Broken(kind=AdmitsWithoutWeights, test=MACHINE, says="AssertionError", parameters=TWO_BY_ONE),
    Broken(kind=KeepsDropped, test="test_dropped_group_makes_room_and_is_not_selected", says="assert 0 == 1"),
    Broken(kind=TrainsTwice, test=MACHINE, says="AssertionError|twice", parameters=TWO_BY_ONE),
    Broken(kind=ForgetsReady, test="test_state_goes_through_json_and_back", says="AssertionError|StateError"),
    Broken(kind=NeverRefuses, test="test_room_follows_the_formula", says="DID NOT RAISE"),
    Broken(kind=NeverRefuses, test="test_uid_is_admitted_once", says="DID NOT RAISE"),
]


@pytest.mark.parametrize("row", ADMISSION, ids=name_of)
def test_broken_admission_is_rejected(row: Broken) -> None:
    reject(AdmissionSubject, row)


class TakeLeaves(Store):
    def take(self, uids: Sequence[GroupUid], /) -> tuple[GroupResult, ...]:
        return tuple(self.groups[uid] for uid in uids)


class TakesHalf(Store):
    def take(self, uids: Sequence[GroupUid], /) -> tuple[GroupResult, ...]:
        taken = [self.groups.pop(uid) for uid in uids if uid in self.groups]
        if len(taken) < len(uids):
            raise StateError(f"missing one of {[str(uid) for uid in uids]}")
        return tuple(taken)


class Overwrites(Store):
    def put(self, result: GroupResult, /) -> None:
        self.groups[result.uid] = result


class InItsOwnOrder(Store):
    def take(self, uids: Sequence[GroupUid], /) -> tuple[GroupResult, ...]:
        return super().take(sorted(uids))


STORE = [
    Broken(kind=TakeLeaves, test="test_taken_group_is_gone", says="DID NOT RAISE|KeyError"),
    Broken(kind=TakesHalf, test="test_missing_group_is_named_and_nothing_is_taken", says="assert 0 == 1"),
    Broken(kind=Overwrites, test="test_same_uid_twice_is_refused_and_the_first_kept", says="DID NOT RAISE"),
    Broken(kind=InItsOwnOrder, test="test_groups_come_back_unchanged_in_the_order_asked_for", says="AssertionError"),
]


@pytest.mark.parametrize("row", STORE, ids=name_of)
def test_broken_store_is_rejected(row: Broken) -> None:
    reject(StoreSubject, row)


class AlwaysTheFirst(Balancer):
    def choose(self, key: str | None) -> str:
        return min(self.active())


class BlackHole(Balancer):
    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /) -> None:
        await super().release(leases, SUCCESS)


class CountsStaleLeases(Balancer):
    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /) -> None:
        for lease in leases:
            self.members[lease.replica].in_flight -= 1


class ForgetsKeys(Balancer):
    def choose(self, key: str | None) -> str:
        return super().choose(None)


class LosesLeasesOfTheTimedOut(Balancer):
    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        taken: list[Lease] = []
        for key in keys:
            taken += await super().acquire(1, keys=[key], deadline=deadline)
        return tuple(taken)


class WaitsForTheDead(Balancer):
    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        try:
            return await super().acquire(n, keys=keys, deadline=deadline)
        except NoHealthyReplica:
            await self.clock.sleep(deadline.remaining(self.clock))
            raise


class LastComeFirstServed(Balancer):
    async def acquire(self, n: int, /, *, keys: Sequence[str | None], deadline: Deadline) -> tuple[Lease, ...]:
        task = asyncio.create_task(super().acquire(n, keys=keys, deadline=deadline))
        await asyncio.sleep(0)
        self.queue.reverse()
        return await task


class DrainsNothing(Balancer):
    async def drain(self, replica: str, /, *, deadline: Deadline) -> None:
        self.members[replica].state = "draining"


class QuarantinesTheAborted(Balancer):
    async def release(self, leases: Sequence[Lease], outcome: LeaseOutcome, /) -> None:
        await super().release(leases, SUCCESS if outcome == SUCCESS else FAILURE)


class OldEpoch(Balancer):
    async def add(self, replica: str, /, *, capacity: int) -> None:
        await super().add(replica, capacity=capacity)
        self.members[replica].epoch = 1


BALANCER = [
    Broken(kind=AlwaysTheFirst, test="test_idle_replicas_share_evenly", says="AssertionError"),
    Broken(
        kind=AlwaysTheFirst, test="test_capacity_is_never_exceeded_and_a_release_lets_the_next_in", says="Assertion"
    ),
    Broken(kind=BlackHole, test="test_dead_replica_is_no_black_hole", says="must get no further lease"),
    Broken(kind=CountsStaleLeases, test="test_repeated_release_changes_nothing", says="AssertionError"),
    Broken(
        kind=CountsStaleLeases, test="test_late_release_after_return_of_the_replica_changes_nothing", says="Assertion"
    ),
    Broken(kind=ForgetsKeys, test="test_key_returns_to_the_replica_that_served_it", says="AssertionError"),
    Broken(kind=LosesLeasesOfTheTimedOut, test="test_timeout_holds_no_lease", says="AssertionError"),
    Broken(
        kind=WaitsForTheDead,
        test="test_waiting_call_ends_when_the_last_replica_fails",
        says="must not wait for its deadline",
    ),
    Broken(kind=LastComeFirstServed, test="test_waiting_calls_are_served_in_order", says="AssertionError"),
    Broken(kind=DrainsNothing, test="test_drain_waits_for_leases_and_grants_none", says="AssertionError"),
    Broken(kind=DrainsNothing, test="test_drain_ends_at_its_deadline", says="DID NOT RAISE"),
    Broken(
        kind=QuarantinesTheAborted, test="test_aborted_lease_leaves_the_replica_serving", says="quarantined.*active"
    ),
    Broken(kind=OldEpoch, test="test_quarantined_replica_comes_back_by_add", says="AssertionError"),
]


@pytest.mark.parametrize("row", BALANCER, ids=name_of)
def test_broken_balancer_is_rejected(row: Broken) -> None:
    reject(BalancerSubject, row)


class AnswersWithoutWeights(ScriptedReplica):
    def _check_servable(self, request: GenerationRequest) -> int:
        return self._version or 0


class ShortSpans(ScriptedReplica):
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        done = await super().generate(request, deadline=deadline)
        return replace(done, spans=done.spans[:-1])


class LogProbsOfThePrompt(ScriptedReplica):
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        done = await super().generate(request, deadline=deadline)
        return replace(done, logprobs=(0.0, *done.logprobs))


class TruncatedPassesAsWhole(ScriptedReplica):
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        done = await super().generate(request, deadline=deadline)
        if isinstance(done, Completion):
            return done
        return Completion(
            request_id=done.request_id,
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            spans=done.spans,
            finish_reason="length",
            logprob_kind=done.logprob_kind,
            replica=done.replica,
        )


class PausesByName(ScriptedReplica):
    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Says that it is paused, and decodes on."""


class CutsWhatItShouldFinish(ScriptedReplica):
    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        await super().pause("abort" if mode == "wait" else mode, deadline=deadline)


class OneVersionForAll(ScriptedReplica):
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        done = await super().generate(request, deadline=deadline)
        last = done.spans[-1]
        whole = VersionSpan(version=last.version, kv_version=last.version, start=0, end=last.end)
        return replace(done, spans=(whole,))


class ResumesAsleep(ScriptedReplica):
    async def resume(self, *, deadline: Deadline) -> None:
        self._asleep = False
        await super().resume(deadline=deadline)


class RemembersWeightsInItsSleep(ScriptedReplica):
    async def sleep(self, *, deadline: Deadline) -> None:
        version = self._version
        await super().sleep(deadline=deadline)
        self._version = version


class CountsPromptsByToken(ScriptedReplica):
    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        status = await super().status(deadline=deadline)
        return replace(status, prompt_tokens=3 * status.generated_tokens)


class FindsMoreInTheCacheThanWasAsked(ScriptedReplica):
    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        status = await super().status(deadline=deadline)
        return replace(status, cached_prompt_tokens=status.prompt_tokens + 1)


class IgnoresAdapters(ScriptedReplica):
    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        return await super().generate(replace(request, adapter=None), deadline=deadline)


class LosesAdaptersAtASync(ScriptedReplica):
    def commit(self, version: int, *, keep_cache: bool) -> None:
        super().commit(version, keep_cache=keep_cache)
        self._adapters.clear()


class TakesAdaptersFromUnderRequests(ScriptedReplica):
    async def unload_adapter(self, name: str, /, *, deadline: Deadline) -> None:
        self._adapters.pop(name, None)


REPLICA = [
    Broken(kind=IgnoresAdapters, test="test_request_for_an_adapter_that_is_not_there_is_refused", says="DID NOT RAISE"),
    Broken(kind=LosesAdaptersAtASync, test="test_adapter_answers_until_it_is_unloaded", says="outlives a sync"),
    Broken(kind=TakesAdaptersFromUnderRequests, test="test_adapter_answers_until_it_is_unloaded", says="DID NOT RAISE"),
    Broken(kind=AnswersWithoutWeights, test="test_nothing_is_generated_before_weights", says="DID NOT RAISE"),
    Broken(kind=ShortSpans, test="test_answers_are_complete_after_weights", says="spans must cover"),
    Broken(kind=CountsPromptsByToken, test="test_answers_are_complete_after_weights", says="each prompt counts once"),
    Broken(kind=FindsMoreInTheCacheThanWasAsked, test="test_answers_are_complete_after_weights", says="AssertionError"),
    Broken(kind=LogProbsOfThePrompt, test="test_answers_are_complete_after_weights", says="AssertionError"),
    Broken(kind=TruncatedPassesAsWhole, test="test_aborted_request_is_of_the_other_type", says="AbortedCompletion"),
    Broken(
        kind=TruncatedPassesAsWhole,
        test="test_pause_abort_cuts_what_runs_and_later_requests_wait",
        says="AbortedCompletion",
    ),
    Broken(
        kind=PausesByName,
        test="test_pause_abort_cuts_what_runs_and_later_requests_wait",
        says="isinstance|AssertionError",
    ),
    Broken(kind=CutsWhatItShouldFinish, test="test_pause_wait_finishes_what_runs", says="isinstance"),
    Broken(
        kind=OneVersionForAll,
        test="test_pause_keep_continues_with_both_versions_in_the_spans",
        says="AssertionError",
    ),
    Broken(kind=ResumesAsleep, test="test_sleeping_replica_holds_nothing_until_a_full_sync", says="DID NOT RAISE"),
    Broken(
        kind=RemembersWeightsInItsSleep, test="test_sleeping_replica_holds_nothing_until_a_full_sync", says="Assertion"
    ),
]


@pytest.mark.parametrize("row", REPLICA, ids=name_of)
def test_broken_replica_is_rejected(row: Broken) -> None:
    reject(ReplicaSubject, row)


class NoLimit(InProcessRuntime):
    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        later = replace(deadline, at=deadline.at + 300.0)
        return await super().call(actor, method, arguments, deadline=later)


class WrapsErrors(InProcessRuntime):
    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        try:
            return await super().call(actor, method, arguments, deadline=deadline)
        except (KeyError, StateError) as exc:
            raise RuntimeError(f"remote error: {exc}") from exc


class OneAtATime(InProcessRuntime):
    async def call(
        self, actor: ActorRef, method: str, arguments: Mapping[str, object], /, *, deadline: Deadline
    ) -> object:
        self.lock = getattr(self, "lock", asyncio.Lock())
        async with self.lock:
            return await super().call(actor, method, arguments, deadline=deadline)


class KillsByName(InProcessRuntime):
    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        """Says that it is dead, and lets it live."""


class ReportsKills(InProcessRuntime):
    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        self.fail(actor, "killed")


class HidesTheCause(InProcessRuntime):
    async def spawn(self, spec: ActorSpec, /, *, deadline: Deadline) -> ActorRef:
        try:
            return await super().spawn(spec, deadline=deadline)
        except ActorFailed as exc:
            raise ActorFailed(replace(exc.record, cause="the actor died")) from None


class PromisesAnything(InProcessRuntime):
    async def place(self, request: PlacementRequest, /, *, deadline: Deadline) -> DeviceGrant:
        return DeviceGrant(pool=request.pool, bundles=request.bundles)


class SpawnsAfterClose(InProcessRuntime):
    async def close(self, *, deadline: Deadline) -> None:
        await super().close(deadline=deadline)
        self._closed = False


RUNTIME = [
    Broken(kind=NoLimit, test="test_call_ends_at_its_deadline", says="AssertionError"),
    Broken(kind=WrapsErrors, test="test_error_of_a_method_arrives_as_it_was", says="RuntimeError: remote error"),
    Broken(kind=OneAtATime, test="test_async_methods_run_at_once", says="Timeout"),
    Broken(kind=OneAtATime, test="test_long_call_does_not_delay_a_short_one", says="Timeout|assert"),
    Broken(kind=KillsByName, test="test_kill_ends_pending_and_later_calls", says="DID NOT RAISE|Timeout"),
    Broken(kind=ReportsKills, test="test_kill_is_not_reported_as_a_failure", says="AssertionError"),
    Broken(kind=HidesTheCause, test="test_constructor_error_is_the_cause", says="no model"),
    Broken(kind=PromisesAnything, test="test_too_much_is_refused_naming_it_and_leaves_nothing", says="DID NOT RAISE"),
    Broken(kind=SpawnsAfterClose, test="test_close_ends_everything_and_may_be_repeated", says="DID NOT RAISE"),
]


@pytest.mark.parametrize("row", RUNTIME, ids=name_of)
def test_broken_runtime_is_rejected(row: Broken) -> None:
    reject(RuntimeSubject, row)


class ZeroForFailure(Agents):
    def failed(self, exc: Exception, index: int) -> SampleResult:
        return replace(super().failed(exc, index), outcome=SCORED, score=0.0)


class OneFailsAll(Agents):
    def failed(self, exc: Exception, index: int) -> SampleResult:
        raise exc


class LosesTheFailed(Agents):
    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        whole = await super().run_group(request, deadline=deadline)
        kept = [sample for sample in whole.samples if sample.outcome == SCORED]
        return GroupResult(uid=whole.uid, samples=tuple(replace(s, index=i) for i, s in enumerate(kept)))


class NoLimitPerSample(Agents):
    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        self.sample_limit_s = 1e9
        return await super().run_group(request, deadline=deadline)


class ForgetsWhy(Agents):
    def failed(self, exc: Exception, index: int) -> SampleResult:
        return replace(super().failed(exc, index), failure=None)


class WrongUid(Agents):
    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        whole = await super().run_group(request, deadline=deadline)
        return replace(whole, uid=GroupUid(epoch=0, row=0))


AGENTS = [
    Broken(kind=ZeroForFailure, test="test_one_failed_sample_spares_the_others", says="AssertionError"),
    Broken(kind=OneFailsAll, test="test_one_failed_sample_spares_the_others", says="scripted failure"),
    Broken(kind=LosesTheFailed, test="test_one_failed_sample_spares_the_others", says="AssertionError"),
    Broken(kind=NoLimitPerSample, test="test_sample_that_hangs_is_timed_out_at_its_own_limit", says="AssertionError"),
    Broken(kind=ForgetsWhy, test="test_one_failed_sample_spares_the_others", says="AssertionError"),
    Broken(kind=WrongUid, test="test_group_comes_back_whole_and_scored", says="AssertionError"),
]


@pytest.mark.parametrize("row", AGENTS, ids=name_of)
def test_broken_agent_loop_manager_is_rejected(row: Broken) -> None:
    reject(AgentsSubject, row)


class Remembers(Length):
    def __init__(self) -> None:
        self.seen = 0

    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        self.seen += 1
        return replace(super().score(request, response), metrics={"seen": float(self.seen)})


class Divides(Length):
    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        result = super().score(request, response)
        return replace(result, score=(result.score or 0.0) * len(response) / len(response))


class Constant(Length):
    def score(self, request: RewardRequest, response: str, /) -> RewardResult:
        return RewardResult(outcome=SCORED, score=1.0)


REWARD = [
    Broken(kind=Remembers, test="test_verdict_does_not_depend_on_what_was_judged_before", says="AssertionError"),
    Broken(kind=Divides, test="test_odd_responses_get_a_verdict", says="ZeroDivisionError"),
    Broken(kind=Constant, test="test_known_answers_get_their_scores", says="'abxx' got 1.0"),
]


@pytest.mark.parametrize("row", REWARD, ids=name_of)
def test_broken_reward_is_rejected(row: Broken) -> None:
    reject(RewardSubject, row)
