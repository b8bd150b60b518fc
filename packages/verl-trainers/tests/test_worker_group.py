"""The group and its actor over an in-process runtime, with a real transfer to a receiver in a thread."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from worker_cases import make_batch, make_model

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import ActorFailed, ConfigError, DataError, WaitTimeout, WeightSyncError
from verl_contracts.events import NullEvents
from verl_contracts.runtime import Bundle, DeviceGrant, PayloadRef, PlacementRequest, RuntimeSettings
from verl_contracts.testing.inprocess import InProcessRuntime
from verl_contracts.testing.memory import MemoryPlanner, MemoryReceiver
from verl_contracts.training import StepContext, TrainBatch
from verl_contracts.weights import LoadReport
from verl_trainers.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    CheckpointEngineConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from verl_trainers.workers.group import PolicyWorkerGroup, engine_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from verl_contracts.clock import Clock
    from verl_contracts.events import EventSink
    from verl_contracts.runtime import ActorRef, ActorSpec
    from verl_contracts.weights import TensorMeta

CLOCK = SystemClock()


def _soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(CLOCK, seconds)


def _config(path: str) -> RunConfig:
    return RunConfig(
        actor_rollout_ref=ActorRolloutRefConfig(
            model=ModelConfig(path=path),
            actor=ActorConfig(optim=OptimConfig(lr=1e-3)),
            rollout=RolloutConfig(
                dtype="bfloat16",
                checkpoint_engine=CheckpointEngineConfig(backend="verl_contracts.testing.memory:MemoryBackend"),
            ),
        )
    )


def _batch() -> TrainBatch:
    rows = tuple(sample.row for sample in make_batch())
    return TrainBatch(rows=rows, num_groups=4, expected_rows=16)


class Collector:
    """A weight target that keeps what it is given."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._fail_at = fail_at

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        for meta, tensor in items:
            if len(self.tensors) == self._fail_at:
                raise WeightSyncError("transfer", "this target is broken", tensor=meta.name)
            self.tensors[meta.name] = tensor.clone()
        return LoadReport(loaded=tuple(self.tensors))


class CountingRuntime(InProcessRuntime):
    """Remembers the names of actors that came and went."""

    def __init__(self, settings: RuntimeSettings, *, clock: Clock, events: EventSink) -> None:
        super().__init__(settings, clock=clock, events=events)
        self.spawned: set[str] = set()
        self.killed: set[str] = set()

    async def spawn(self, spec: ActorSpec, /, *, deadline: Deadline) -> ActorRef:
        actor = await super().spawn(spec, deadline=deadline)
        self.spawned.add(actor.name)
        return actor

    async def kill(self, actor: ActorRef, /, *, deadline: Deadline) -> None:
        self.killed.add(actor.name)
        await super().kill(actor, deadline=deadline)


@pytest.fixture
async def runtime() -> AsyncIterator[InProcessRuntime]:
    made = await InProcessRuntime.create(RuntimeSettings(run_id="test"), clock=CLOCK, events=NullEvents())
    yield made
    await made.close(deadline=_soon())


async def _place(runtime: InProcessRuntime, count: int = 1) -> DeviceGrant:
    return await runtime.place(PlacementRequest(pool="trainer", bundles=(Bundle(),) * count), deadline=_soon())


@pytest.fixture
async def group(runtime: InProcessRuntime, tmp_path: Path) -> PolicyWorkerGroup:
    return await PolicyWorkerGroup.create(
        runtime=runtime,
        grant=await _place(runtime),
        config=_config(make_model(tmp_path / "model")),
        total_steps=10,
        deadline=_soon(),
    )


async def _sync(group: PolicyWorkerGroup, version: int, target: Collector) -> None:
    host = group.sender_host
    receiver = MemoryReceiver(owner="replica-0", clock=CLOCK)
    manifest, senders = await host.prepare(version, session=f"s{version}", deadline=_soon())
    endpoint = receiver.prepare(session=f"s{version}", rank=0)
    plan = MemoryPlanner().plan(
        manifest, session=f"s{version}", senders=senders, receivers=[endpoint], bucket_bytes=1024
    )
    receiving = asyncio.to_thread(receiver.receive, plan, target, deadline=_soon())
    try:
        sent, received = await asyncio.gather(host.transfer(plan, deadline=_soon()), receiving)
        assert [report.rank for report in sent] == [0]
        assert sent[0].digests == received.digests
        assert sent[0].num_bytes == manifest.num_bytes
    finally:
        await host.close(deadline=_soon())
        receiver.close()


async def test_step_then_sync_brings_new_weights(group: PolicyWorkerGroup) -> None:
    first, second = Collector(), Collector()
    await _sync(group, 0, first)
    result = await group.update(_batch(), StepContext(step=1, total_steps=10), deadline=_soon())
    assert (result.version, result.rows, result.updates) == (1, 16, 1)
    assert {"fetch", "prepare", "forward_backward", "optimizer"} <= set(result.seconds)
    await _sync(group, 1, second)
    name = "model.layers.0.mlp.up_proj.weight"
    assert first.tensors[name].dtype == torch.bfloat16
    assert first.tensors.keys() == second.tensors.keys()
    assert not torch.equal(first.tensors[name], second.tensors[name])


async def test_transfer_that_failed_leaves_the_group_usable(group: PolicyWorkerGroup) -> None:
    with pytest.raises(WeightSyncError):
        await _sync(group, 0, Collector(fail_at=2))
    whole = Collector()
    await _sync(group, 1, whole)
    assert len(whole.tensors) > 20


async def test_abort_ends_a_transfer_that_blocks(group: PolicyWorkerGroup) -> None:
    host = group.sender_host
    receiver = MemoryReceiver(owner="replica-0", clock=CLOCK)
    manifest, senders = await host.prepare(0, session="s0", deadline=_soon())
    endpoint = receiver.prepare(session="s0", rank=0)
    plan = MemoryPlanner().plan(manifest, session="s0", senders=senders, receivers=[endpoint], bucket_bytes=1024)
    transfer = asyncio.create_task(host.transfer(plan, deadline=_soon(60.0)))
    await asyncio.wait([transfer], timeout=0.2)  # nobody receives
    assert not transfer.done()
    await host.abort("the test says so", deadline=_soon())
    with pytest.raises(WeightSyncError, match="the test says so"):
        await asyncio.wait_for(transfer, 10.0)
    await host.close(deadline=_soon())
    receiver.close()
    assert (await group.update(_batch(), StepContext(step=1, total_steps=10), deadline=_soon())).updates == 1


async def test_payload_of_another_kind_is_named(group: PolicyWorkerGroup) -> None:
    batch = _batch()
    wrong = dataclasses.replace(batch.rows[3], payload=PayloadRef(num_bytes=0, value=["text"]))
    batch = dataclasses.replace(batch, rows=(*batch.rows[:3], wrong, *batch.rows[4:]))
    with pytest.raises(DataError, match="sample 3 of group 0-0-0 must be a tuple of Trajectory, got list"):
        await group.update(batch, StepContext(step=1, total_steps=10), deadline=_soon())


async def test_ranks_that_did_not_answer_in_time_are_named(group: PolicyWorkerGroup) -> None:
    with pytest.raises(WaitTimeout, match=r"policy\.update, held by test/policy/0#1$"):
        await group.update(_batch(), StepContext(step=1, total_steps=10), deadline=_soon(1e-9))


async def test_save_goes_through_and_close_is_idempotent(group: PolicyWorkerGroup, tmp_path: Path) -> None:
    await group.save(str(tmp_path / "saved"), deadline=_soon())
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    await group.close(deadline=_soon())
    await group.close(deadline=_soon())
    with pytest.raises(ActorFailed):
        await group.save(str(tmp_path / "again"), deadline=_soon())


async def test_start_that_fails_leaves_no_actor(tmp_path: Path) -> None:
    runtime = await CountingRuntime.create(RuntimeSettings(run_id="test"), clock=CLOCK, events=NullEvents())
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path"):
        await PolicyWorkerGroup.create(
            runtime=runtime,
            grant=await _place(runtime),
            config=_config(str(tmp_path / "nothing")),
            total_steps=10,
            deadline=_soon(),
        )
    assert len(runtime.spawned) == 1
    assert runtime.killed == runtime.spawned


async def test_two_ranks_in_one_process_are_refused_at_once(runtime: InProcessRuntime, tmp_path: Path) -> None:
    config = _config(make_model(tmp_path / "model"))
    for _ in range(2):  # the first refusal gives the process back
        with pytest.raises(ActorFailed, match=r"rank 1 of 2: this process is a rank already.*runtime=ray"):
            await PolicyWorkerGroup.create(
                runtime=runtime, grant=await _place(runtime, 2), config=config, total_steps=10, deadline=_soon()
            )


def test_settings_follow_config_and_bundle() -> None:
    config = _config("somewhere")
    bundles = (Bundle(cpus=2.0), Bundle(cpus=2.0))
    got = engine_settings(config, total_steps=7, rank=1, bundles=bundles)
    assert (got.rank, got.world_size, got.device, got.num_threads, got.wire_dtype) == (1, 2, "cpu", 2, "bfloat16")
    deterministic = dataclasses.replace(config, deterministic=True)
    assert engine_settings(deterministic, total_steps=7, rank=0, bundles=bundles).num_threads == 1
    gpus = (Bundle(cpus=1.0, gpus=1.0),)
    assert engine_settings(config, total_steps=7, rank=0, bundles=gpus).device == "cuda"
    on_cpu = dataclasses.replace(config, trainer=TrainerConfig(device="cpu"))
    assert engine_settings(on_cpu, total_steps=7, rank=0, bundles=gpus).device == "cpu"
    on_cuda = dataclasses.replace(config, trainer=TrainerConfig(device="cuda"))
    with pytest.raises(ConfigError, match="bundle 0 of the trainer has no GPU"):
        engine_settings(on_cuda, total_steps=7, rank=0, bundles=bundles)


async def test_algorithm_that_cannot_be_built_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = dataclasses.replace(
        _config(make_model(tmp_path / "model")), algorithm=AlgorithmConfig(options={"epsilom": 1.0})
    )
    runtime = await CountingRuntime.create(RuntimeSettings(run_id="test"), clock=CLOCK, events=NullEvents())
    with pytest.raises(ConfigError, match="epsilom"):
        await PolicyWorkerGroup.create(
            runtime=runtime, grant=await _place(runtime), config=config, total_steps=10, deadline=_soon()
        )
    assert not runtime.spawned
