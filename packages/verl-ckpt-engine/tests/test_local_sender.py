from __future__ import annotations

import pytest
from ckpt_hosts import ThreadReplica
from ckpt_transport import CLOCK, check_equal, sample_weights

from verl_ckpt_engine.local_sender import LocalSenderHost
from verl_ckpt_engine.manager import TransactionalManager
from verl_ckpt_engine.shm.sender import ShmSender
from verl_contracts.clock import Deadline
from verl_contracts.errors import WeightSyncError
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.tensors import ListSource
from verl_contracts.weights import CheckpointSettings


def soon() -> Deadline:
    return Deadline.after(CLOCK, 20.0)


async def test_one_process_sends_what_it_holds_at_each_sync() -> None:
    weights = sample_weights()
    host = LocalSenderHost(ShmSender(owner="trainer", rank=0, clock=CLOCK), ListSource(weights), clock=CLOCK)
    replica = ThreadReplica("r0")
    manager = await TransactionalManager.create(
        CheckpointSettings(bucket_bytes=2048), sender=host, replicas=[replica], clock=CLOCK, events=RecordingEvents()
    )
    try:
        await manager.update_weights(1, deadline=soon())
        check_equal(replica.loaded, weights)
        halved = {name: tensor / 2 for name, tensor in weights.items()}
        host.source = ListSource(halved)
        await manager.update_weights(2, deadline=soon())
        check_equal(replica.loaded, halved)
        host.source = ListSource(weights, stop_after=1)
        with pytest.raises(WeightSyncError):
            await manager.update_weights(3, deadline=soon())
    finally:
        await manager.close(deadline=soon())
        replica.stop()
