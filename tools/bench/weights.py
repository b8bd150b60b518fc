"""The sending side of a weight sync from a model of this process, for rows that need weights in a replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from verl_ckpt_engine.shm.sender import ShmSender
from verl_contracts.weights import Manifest, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from transformers import PreTrainedModel

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.weights import EndpointInfo, Plan, TransferReport, WeightSenderHost, WeightSource

__all__ = ["ModelSender"]


class _ModelSource:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def manifest(self, version: int, /) -> Manifest:
        tensors = tuple(self.tensors())
        return Manifest(
            version=version,
            tensors=tuple(meta for meta, _ in tensors),
            num_bytes=sum(tensor.numel() * tensor.element_size() for _, tensor in tensors),
        )

    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for name, tensor in self._model.named_parameters():
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield TensorMeta(name=name, shape=tuple(tensor.shape), dtype=dtype), tensor.detach()


class ModelSender:
    """A trainer of one rank that never trains."""

    def __init__(self, model: PreTrainedModel, *, clock: Clock) -> None:
        self._source = _ModelSource(model)
        self._sender = ShmSender(owner="trainer", rank=0, clock=clock)

    async def prepare(
        self, version: int, /, *, session: str, deadline: Deadline
    ) -> tuple[Manifest, Sequence[EndpointInfo]]:
        """Prepare the one rank."""
        manifest = self._source.manifest(version)
        return manifest, [self._sender.prepare(manifest, session=session)]

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Send everything."""
        return [await asyncio.to_thread(self._sender.send, plan, self._source, deadline=deadline)]

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer that is under way."""
        self._sender.abort(reason)

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created."""
        self._sender.close()


if TYPE_CHECKING:

    def _is_host(x: ModelSender) -> WeightSenderHost:
        return x

    def _is_source(x: _ModelSource) -> WeightSource:
        return x
