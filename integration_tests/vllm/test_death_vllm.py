"""An engine that is killed, or a replica that is: every request is answered once, and nobody serves before a sync."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shared import CLOCK, VOCAB, end_all, need_two_devices, on_loop, settings_of, soon, weights_of
from texts import compare, greedy

from verl_ckpt_engine.local_sender import LocalSenderHost
from verl_ckpt_engine.manager import TransactionalManager
from verl_ckpt_engine.shm.sender import ShmSender
from verl_contracts.errors import ActorFailed
from verl_contracts.rollout import DEAD, INVALID, SERVING
from verl_contracts.runtime import RuntimeSettings
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.tensors import ListSource
from verl_contracts.tokens import Completion
from verl_contracts.weights import CheckpointSettings
from verl_rollout.manager import ReplicaManager
from verl_runtime.ray import RayRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedModel

    from verl_contracts.rollout import Replica

LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Two replicas on Ray and what brings weights to them."""

    servers: ReplicaManager
    checkpoint: TransactionalManager


@asynccontextmanager
async def system(folder: Path, model: PreTrainedModel) -> AsyncIterator[System]:
    """Yield two replicas that serve version 1."""
    events = RecordingEvents()
    runtime = await RayRuntime.create(
        RuntimeSettings(run_id="vllmdeath", options={"num_cpus": 2}), clock=CLOCK, events=events
    )
    try:
        servers = await ReplicaManager.create(
            settings_of(folder, num_replicas=2, max_num_seqs=32),
            runtime=runtime,
            grant=None,
            start_rank=None,
            events=events,
            deadline=soon(150.0),
        )
        checkpoint = await TransactionalManager.create(
            CheckpointSettings(),
            sender=LocalSenderHost(
                ShmSender(owner="trainer", rank=0, clock=CLOCK), ListSource(weights_of(model)), clock=CLOCK
            ),
            replicas=servers.replicas(),
            clock=CLOCK,
            events=events,
        )
        await checkpoint.update_weights(1, deadline=soon())
        await servers.admit([replica.replica_id for replica in servers.replicas()])
        yield System(servers=servers, checkpoint=checkpoint)
    finally:
        await runtime.close(deadline=soon())


def below(pid: int) -> dict[int, str]:
    """Return the living descendants of a process, and their titles."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        try:
            parents[int(folder.name)] = int((folder / "status").read_text().split("PPid:")[1].split()[0])
        except (OSError, ValueError):
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    titles = {}
    for child in found - {pid}:
        try:
            titles[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
    return titles


def an_engine() -> int:
    """Return the process of one of the engines."""
    return next(pid for pid, title in below(os.getpid()).items() if "EngineCore" in title)


async def lives(replica: Replica) -> bool:
    """Return whether it could serve."""
    try:
        return (await replica.status(deadline=soon())).state != DEAD
    except ActorFailed:
        return False


def parent_of(pid: int) -> int:
    """Return the process that started `pid`."""
    return int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["engine", pytest.param("replica", marks=pytest.mark.slow)])
def test_everything_is_answered_once_when_an_engine_or_a_replica_is_killed(
    tiny: tuple[Path, PreTrainedModel], victim: str
) -> None:
    need_two_devices()
    folder, model = tiny
    end_all()  # the engines that other tests share have the same devices

    async def case() -> None:
        async with system(folder, model) as here:
            client = here.servers.client()
            requests = greedy(range(64), max_tokens=LENGTH)
            running = [asyncio.create_task(client.generate(request, deadline=soon(120.0))) for request in requests]
            async with asyncio.timeout(60.0):
                for replica in here.servers.replicas():
                    while (await replica.status(deadline=soon())).generated_tokens < 32 * 16:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            engine = an_engine()
            os.kill(engine if victim == "engine" else parent_of(engine), signal.SIGKILL)
            replies = await asyncio.gather(*running)
            assert [reply.request_id.split("#")[0] for reply in replies] == [r.request_id for r in requests]
            for reply in replies:
                assert isinstance(reply, Completion)
                assert len(reply.token_ids) == len(reply.logprobs) == LENGTH
                assert [span.start for span in reply.spans[1:]] == [span.end for span in reply.spans[:-1]]
                assert (reply.spans[0].start, reply.spans[-1].end) == (0, LENGTH)
                assert all(0 <= token < VOCAB for token in reply.token_ids)
            compare(replies, requests, model)
            (dying,) = [replica for replica in here.servers.replicas() if not await lives(replica)]
            (living,) = [replica for replica in here.servers.replicas() if replica is not dying]
            with pytest.raises((ActorFailed, RuntimeError)):
                await dying.pause("abort", deadline=soon())

            await here.servers.remove([dying.replica_id], deadline=soon())
            await here.checkpoint.remove(dying.replica_id)
            (fresh,) = await here.servers.add(1, deadline=soon(120.0))
            await here.checkpoint.add(fresh)
            assert (await fresh.status(deadline=soon())).state == INVALID
            report = await here.checkpoint.update_weights(2, deadline=soon())
            assert [row.replica for row in report.replicas if row.committed] == [living.replica_id, fresh.replica_id]
            await here.servers.admit([fresh.replica_id])
            assert (await fresh.status(deadline=soon())).state == SERVING
            again = await asyncio.gather(*(client.generate(r, deadline=soon()) for r in greedy(range(100, 132))))
            assert {reply.replica for reply in again} == {living.replica_id, fresh.replica_id}
        assert not any("EngineCore" in title for title in below(os.getpid()).values()), "nothing outlives the run"

    on_loop(case(), 280.0)
