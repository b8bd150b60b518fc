"""A replica that is killed, and a sync that fails half-way: real Ray processes, real weights in shared memory."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

from verl_ckpt_engine.manager import TransactionalManager
from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import StateError, WeightSyncError
from verl_contracts.rollout import INVALID, SERVING, LLMServerManager, Replica, RolloutSettings
from verl_contracts.runtime import Bundle, PlacementRequest, RuntimeSettings
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams
from verl_contracts.weights import CheckpointSettings, EndpointInfo, Manifest, Plan, TransferReport, WeightReceiverHost
from verl_rollout.manager import ReplicaManager
from verl_runtime.ray import RayRuntime
from verl_trainers.config.load import load_config
from verl_trainers.recipes import toy
from verl_trainers.workers.group import PolicyWorkerGroup

CLOCK = SystemClock()


def soon(seconds: float = 120.0) -> Deadline:
    return Deadline.after(CLOCK, seconds)


def request(number: int, *, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_ids=(1, 2, 3, 4, 10),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SampleKey(uid=f"0-{number}-0", sample=0, turn=0),
    )


class FailingReceiverHost:
    """The receiver of a replica, which raises half-way when it is told to."""

    def __init__(self, inner: WeightReceiverHost, replica: FailingReplica) -> None:
        self._inner = inner
        self._replica = replica

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> list[EndpointInfo]:
        return list(await self._inner.prepare(manifest, session=session, deadline=deadline))

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> list[TransferReport]:
        reports = list(await self._inner.transfer(plan, deadline=deadline))
        if self._replica.fails:
            raise WeightSyncError("transfer", "the receiver raised on purpose", "model.embed_tokens.weight")
        return reports

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        await self._inner.commit(version, keep_cache=keep_cache, deadline=deadline)

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        await self._inner.abort(reason, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        await self._inner.close(deadline=deadline)


class FailingReplica:
    """A replica whose transfers fail while `fails` is set; everything else is the real one's."""

    def __init__(self, inner: Replica) -> None:
        self.inner = inner
        self.fails = False
        self.replica_id = inner.replica_id
        self.capacity = inner.capacity
        self.capabilities = inner.capabilities
        self.receiver_host = FailingReceiverHost(inner.receiver_host, self)
        self.generate = inner.generate
        self.abort = inner.abort
        self.pause = inner.pause
        self.resume = inner.resume
        self.status = inner.status


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Two replicas, one trainer rank, and what moves weights between them."""

    servers: LLMServerManager
    checkpoint: TransactionalManager
    workers: PolicyWorkerGroup
    replicas: list[FailingReplica]
    logs: Path


@asynccontextmanager
async def system(folder: Path) -> AsyncIterator[System]:
    toy.prepare(folder / "prepared")
    recipe = Path(str(files("verl_trainers") / "recipes" / "quickstart.yaml"))
    config = load_config(recipe, (), run_dir=str(folder))
    events = RecordingEvents()
    runtime = await RayRuntime.create(
        RuntimeSettings(run_id="failover", log_dir=str(folder / "logs"), options={"num_cpus": 3}),
        clock=CLOCK,
        events=events,
    )
    try:
        grant = await runtime.place(PlacementRequest(pool="trainer", bundles=(Bundle(),)), deadline=soon())
        servers, workers = await asyncio.gather(
            ReplicaManager.create(
                RolloutSettings(
                    model_path=config.actor_rollout_ref.model.path, num_replicas=2, max_model_len=64, max_num_seqs=16
                ),
                runtime=runtime,
                grant=None,
                start_rank=None,
                events=events,
                deadline=soon(),
            ),
            PolicyWorkerGroup.create(runtime=runtime, grant=grant, config=config, total_steps=10, deadline=soon()),
        )
        replicas = [FailingReplica(replica) for replica in servers.replicas()]
        checkpoint = await TransactionalManager.create(
            CheckpointSettings(), sender=workers.sender_host, replicas=replicas, clock=CLOCK, events=events
        )
        yield System(servers=servers, checkpoint=checkpoint, workers=workers, replicas=replicas, logs=folder / "logs")
    finally:
        await runtime.close(deadline=soon())


def process_of(log: Path) -> int:
    """The process that writes `log`."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "fd" / "1").readlink() == log:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"nobody writes {log}")


@pytest.mark.timeout(300)
async def test_64_requests_survive_the_death_of_one_of_two_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with system(tmp_path) as parts:
        report = await parts.checkpoint.update_weights(0, deadline=soon())
        await parts.servers.admit([row.replica for row in report.replicas if row.committed])
        client = parts.servers.client()
        victim = parts.replicas[1].replica_id
        (log,) = [path for path in parts.logs.iterdir() if path.name.startswith("rollout-1")]
        pid = process_of(log)
        calls = [asyncio.create_task(client.generate(request(n, max_tokens=48), deadline=soon())) for n in range(64)]
        async with asyncio.timeout(30.0):
            while (await parts.replicas[1].status(deadline=soon())).running == 0:
                pass  # asking is a remote call, so this does not spin
        with caplog.at_level(logging.WARNING):
            os.kill(pid, signal.SIGKILL)
            replies = await asyncio.gather(*calls)  # wait: each call has a deadline
        assert all(isinstance(reply, Completion) for reply in replies)
        assert [reply.request_id for reply in replies] == [f"r{n}" for n in range(64)], "each once, none twice"
        assert all(len(reply.token_ids) == len(reply.logprobs) > 0 for reply in replies)
        warned = [record.getMessage() for record in caplog.records]
        assert any(victim in text for text in warned), warned
        again = await asyncio.gather(
            *(client.generate(request(100 + n, max_tokens=4), deadline=soon()) for n in range(20))
        )
        assert {reply.replica for reply in again} == {parts.replicas[0].replica_id}


@pytest.mark.timeout(300)
async def test_a_sync_that_raises_half_way_leaves_nobody_paused(tmp_path: Path) -> None:
    async with system(tmp_path) as parts:
        good, bad = parts.replicas
        with pytest.raises(StateError):
            await good.generate(request(0, max_tokens=4), deadline=soon())
        bad.fails = True
        report = await parts.checkpoint.update_weights(0, deadline=soon())
        assert {row.replica: row.committed for row in report.replicas} == {
            good.replica_id: True,
            bad.replica_id: False,
        }
        assert parts.checkpoint.versions() == {good.replica_id: 0, bad.replica_id: None}
        assert (await good.status(deadline=soon())).state == SERVING
        assert (await bad.status(deadline=soon())).state == INVALID
        assert isinstance(await good.generate(request(1, max_tokens=4), deadline=soon()), Completion)
        with pytest.raises(StateError):
            await bad.generate(request(2, max_tokens=4), deadline=soon())
        bad.fails = False
        await parts.checkpoint.update_weights(1, deadline=soon())
        assert parts.checkpoint.versions() == {good.replica_id: 1, bad.replica_id: 1}
        reply = await bad.generate(request(3, max_tokens=4), deadline=soon())
        assert isinstance(reply, Completion)
        assert [(span.version, span.kv_version) for span in reply.spans] == [(1, 1)]


@pytest.mark.timeout(300)
async def test_the_sync_fails_when_too_few_replicas_commit_and_the_next_one_works(tmp_path: Path) -> None:
    async with system(tmp_path) as parts:
        for replica in parts.replicas:
            replica.fails = True
        with pytest.raises(WeightSyncError, match="the receiver raised on purpose") as caught:
            await parts.checkpoint.update_weights(0, deadline=soon())
        assert caught.value.phase == "transfer"
        assert caught.value.tensor == "model.embed_tokens.weight"
        for replica in parts.replicas:
            replica.fails = False
        report = await parts.checkpoint.update_weights(0, deadline=soon())
        assert all(row.committed for row in report.replicas)
    assert_no_weights_held(tmp_path)


def assert_no_weights_held(folder: Path) -> None:
    """Memory of a sync has no name: what there is lies with a process that logs below `folder`, or here."""
    assert not list(Path("/dev/shm").glob("verl-weights-*"))
    for entry in Path("/proc").iterdir():
        try:
            ours = int(entry.name) == os.getpid() or (entry / "fd" / "1").readlink().is_relative_to(folder)
            assert not ours or "verl-weights" not in (entry / "maps").read_text(), entry.name
        except (OSError, ValueError):  # no process, or gone, or another user's
            continue
