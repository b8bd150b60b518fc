from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import ActorFailed
from verl_contracts.testing.scripted import Script, ScriptedReplica
from verl_contracts.testing.scripted_hosts import ScriptedSenderHost
from verl_contracts.testing.suites.replica import ReplicaSuite
from verl_contracts.testing.virtual import VirtualClock, run_virtual
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams
from verl_contracts.weights import Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Replica


async def _commit(replica: Replica, version: int, clock: Clock, *, keep_cache: bool) -> None:
    sender, deadline = ScriptedSenderHost(clock), Deadline.after(clock, 5.0)
    manifest, senders = await sender.prepare(version, session="s", deadline=deadline)
    receivers = await replica.receiver_host.prepare(manifest, session="s", deadline=deadline)
    plan = Plan(
        session="s",
        version=version,
        manifest=manifest,
        senders=tuple(senders),
        receivers=tuple(receivers),
        bucket_bytes=1024,
    )
    (received,) = await replica.receiver_host.transfer(plan, deadline=deadline)
    (sent,) = await sender.transfer(plan, deadline=deadline)
    assert received.digests == sent.digests
    await replica.receiver_host.commit(version, keep_cache=keep_cache, deadline=deadline)


class TestScriptedReplica(ReplicaSuite):
    virtual = True

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Replica]:
        self.clock = clock
        yield ScriptedReplica("s0", clock=clock, script=Script(answer=lambda prompt: tuple(range(1, 1000))))

    async def commit(self, replica: Replica, version: int, *, keep_cache: bool) -> None:
        await _commit(replica, version, self.clock, keep_cache=keep_cache)

    def adapter_folder(self) -> str:
        return str(Path(__file__).parents[1] / "adapter")


class TestScriptedReplicaInRealTime(TestScriptedReplica):
    virtual = False
    long_tokens = 60


def _request(name: str, prompt: tuple[int, ...] = (1,), resumed: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=100),
        key=SampleKey(uid="0-0-0", sample=0, turn=0),
        resumed_tokens=resumed,
    )


def test_nth_request_fails_and_the_replica_lives_when_scripted() -> None:
    async def main() -> None:
        clock = SystemClock()
        replica = ScriptedReplica("s", clock=clock, script=Script(failures={2: OSError("second")}))
        replica.commit(1, keep_cache=False)
        deadline = Deadline.after(clock, 60.0)
        await replica.generate(_request("a"), deadline=deadline)
        with pytest.raises(OSError, match="second"):
            await replica.generate(_request("b"), deadline=deadline)
        await replica.generate(_request("c"), deadline=deadline)

    run_virtual(main())


def test_replica_stays_dead_when_scripted_to_die() -> None:
    async def main() -> None:
        clock = SystemClock()
        replica = ScriptedReplica("s", clock=clock, script=Script(dies_at=2))
        replica.commit(1, keep_cache=False)
        deadline = Deadline.after(clock, 60.0)
        await replica.generate(_request("a"), deadline=deadline)
        for _ in range(2):
            with pytest.raises(ActorFailed, match="scripted death"):
                await replica.generate(_request("b"), deadline=deadline)

    run_virtual(main())


def test_resumed_request_continues_the_same_answer() -> None:
    async def main() -> None:
        clock = SystemClock()
        replica = ScriptedReplica("s", clock=clock)
        replica.commit(1, keep_cache=False)
        deadline = Deadline.after(clock, 60.0)
        whole = await replica.generate(_request("a", (3, 4)), deadline=deadline)
        for cut in range(len(whole.token_ids)):
            prompt = (3, 4, *whole.token_ids[:cut])
            rest = await replica.generate(_request("b", prompt, cut), deadline=deadline)
            assert isinstance(rest, Completion)
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
            assert whole.logprobs[:cut] + rest.logprobs == pytest.approx(whole.logprobs)

    run_virtual(main())


def test_tokens_take_their_time_on_the_virtual_clock() -> None:
    async def main() -> float:
        clock = VirtualClock(asyncio.get_running_loop())
        replica = ScriptedReplica(
            "s", clock=clock, script=Script(answer=lambda prompt: (1,) * 50, seconds_per_token=60.0)
        )
        replica.commit(1, keep_cache=False)
        await replica.generate(_request("a"), deadline=Deadline.after(clock, 1e6))
        return clock.now()

    assert run_virtual(main()) == pytest.approx(3000.0)
