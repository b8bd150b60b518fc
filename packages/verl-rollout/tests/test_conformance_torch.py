"""The embedded engine behind a real replica actor, filled by a real receiver: the kit's suite in real time."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from service_fakes import world_on
from transformers import AutoModelForCausalLM, Qwen2Config

from verl_contracts.clock import Deadline, SystemClock
from verl_contracts.errors import WeightSyncError
from verl_contracts.rollout import RolloutSettings
from verl_contracts.testing.memory import MemoryBackend
from verl_contracts.testing.suites.replica import ReplicaSuite
from verl_contracts.testing.tensors import ListSource
from verl_contracts.testing.transfers import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import Replica

_CLOCK = SystemClock()
_sessions = itertools.count()


def _soon() -> Deadline:
    return Deadline.after(_CLOCK, 30.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, torch.Tensor]]:
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    config.save_pretrained(folder)
    network = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return folder, {name: parameter.detach() for name, parameter in network.named_parameters()}


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(
    model: tuple[Path, Mapping[str, torch.Tensor]],
) -> None:
    folder, tensors = model
    wrong = {**tensors, "model.norm.weight": torch.zeros(33), "head.bias": torch.zeros(2)}
    del wrong["model.layers.1.mlp.up_proj.weight"]

    async def case() -> None:
        async with world_on(_CLOCK) as here:
            manager = await here.manager(_settings(folder))
            with pytest.raises(WeightSyncError, match=r"phase 'prepare': 3 tensors do not fit") as caught:
                await manager.replicas()[0].receiver_host.prepare(
                    ListSource(wrong).manifest(1), session="wrong", deadline=_soon()
                )
            for problem in (
                "the model has no head.bias",
                "model.norm.weight has shape (33,), and (32,) in the model",
                "model.layers.1.mlp.up_proj.weight is not sent",
            ):
                assert problem in str(caught.value)

    asyncio.run(case())


def _settings(folder: Path) -> RolloutSettings:
    return RolloutSettings(
        model_path=str(folder),
        engine="torch",
        max_num_seqs=4,
        max_model_len=512,
        weight_backend="verl_contracts.testing.memory:MemoryBackend",
    )


class TestTorchReplica(ReplicaSuite):
    _folder: Path
    _tensors: Mapping[str, torch.Tensor]

    @pytest.fixture(autouse=True)
    def _model(self, model: tuple[Path, Mapping[str, torch.Tensor]]) -> None:
        self._folder, self._tensors = model

    @asynccontextmanager
    async def opened(self, clock: Clock) -> AsyncIterator[Replica]:
        async with world_on(clock) as here:
            manager = await here.manager(_settings(self._folder))
            yield manager.replicas()[0]

    async def commit(self, replica: Replica, version: int, *, keep_cache: bool) -> None:
        source = ListSource(self._tensors)
        host, manifest, session = replica.receiver_host, source.manifest(version), f"torch{next(_sessions)}"
        sender = MemoryBackend.sender_class(owner="trainer", rank=0, clock=_CLOCK)  # type: ignore[call-arg]
        mine = sender.prepare(manifest, session=session)
        try:
            theirs = await host.prepare(manifest, session=session, deadline=_soon())
            plan = MemoryBackend.planner_class().plan(
                manifest, session=session, senders=[mine], receivers=theirs, bucket_bytes=1 << 20
            )
            sending = run_in_thread(lambda: sender.send(plan, source, deadline=_soon()))
            (report,) = await host.transfer(plan, deadline=_soon())
            sent = sending.end().value
            assert sent is not None
            assert sent.digests == report.digests
            await host.commit(version, keep_cache=keep_cache, deadline=_soon())
        finally:
            sender.close()
            await host.close(deadline=_soon())
