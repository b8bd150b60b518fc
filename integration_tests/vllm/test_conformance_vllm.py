"""The kit's suite for replicas, against vLLM behind a real actor, filled through shared memory."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar, TypeVar

import pytest
from adapters import write_adapter
from shared import CLOCK, on_loop, send, settings_of, soon, weights_of

from verl_contracts.runtime import RuntimeSettings
from verl_contracts.testing.events import RecordingEvents
from verl_contracts.testing.suites.replica import ReplicaSuite
from verl_contracts.testing.tensors import ListSource
from verl_rollout.manager import ReplicaManager
from verl_runtime.local import LocalRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Replica

T = TypeVar("T")


class TestVLLMReplica(ReplicaSuite):
    limit_s = 100.0
    options: ClassVar[Mapping[str, object]] = {}
    _folder: Path
    _tensors: Mapping[str, torch.Tensor]

    @pytest.fixture(autouse=True)
    def _model(self, tiny: tuple[Path, PreTrainedModel]) -> None:
        self._folder, self._tensors = tiny[0], weights_of(tiny[1])

    def run(self, case: Callable[[Clock], Coroutine[object, object, T]]) -> T:
        return on_loop(case(CLOCK))

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Replica]:
        events = RecordingEvents(clock)
        runtime = await LocalRuntime.create(RuntimeSettings(run_id="vllm"), clock=clock, events=events)
        try:
            manager = await ReplicaManager.create(
                settings_of(self._folder, engine="shared:SharedEngine", engine_options=self.options),
                runtime=runtime,
                grant=None,
                start_rank=None,
                events=events,
                deadline=soon(90.0),
            )
            yield manager.replicas()[0]
            await manager.close(deadline=soon())
        finally:
            await runtime.close(deadline=soon())

    async def commit(self, replica: Replica, version: int, *, keep_cache: bool) -> None:
        await send(replica.receiver_host, ListSource(self._tensors), version, keep_cache=keep_cache)
        await asyncio.sleep(0)


class TestVLLMReplicaWithAdapters(TestVLLMReplica):
    options: ClassVar[Mapping[str, object]] = {"max_loras": 1}
    _adapter: Path

    @pytest.fixture(autouse=True)
    def _write(self, tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
        self._adapter = write_adapter(tmp_path, tiny[1], seed=6)

    def adapter_folder(self) -> str:
        return str(self._adapter)
