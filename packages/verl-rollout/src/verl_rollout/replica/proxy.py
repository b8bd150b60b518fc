"""A replica seen from another process. Holds no state but names: what a replica is at the moment, it alone knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.rollout import OpenAIEndpoint, ReplicaStatus
from verl_contracts.tokens import AbortedCompletion, Completion
from verl_contracts.weights import EndpointInfo, TransferReport
from verl_rollout.addresses import ReplicaAddress, answer, answers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import Capability, PauseMode, Replica, SupportsLora, SupportsOpenAI, SupportsSleep
    from verl_contracts.runtime import ActorRef, Caller
    from verl_contracts.tokens import GenerationRequest
    from verl_contracts.weights import Manifest, Plan, WeightReceiverHost

__all__ = ["ReceiverHostProxy", "ReplicaProxy"]


class ReceiverHostProxy:
    """The weight receivers of one replica, behind its `ReplicaActor`."""

    def __init__(self, *, caller: Caller, actor: ActorRef) -> None:
        self._caller = caller
        self._actor = actor

    async def prepare(self, manifest: Manifest, /, *, session: str, deadline: Deadline) -> Sequence[EndpointInfo]:
        """Prepare each rank."""
        arguments = {"manifest": manifest, "session": session}
        endpoints = await self._caller.call(self._actor, "receiver_prepare", arguments, deadline=deadline)
        return answers(endpoints, EndpointInfo, method="ReplicaActor.receiver_prepare")

    async def transfer(self, plan: Plan, /, *, deadline: Deadline) -> Sequence[TransferReport]:
        """Load everything."""
        reports = await self._caller.call(self._actor, "receiver_transfer", {"plan": plan}, deadline=deadline)
        return answers(reports, TransferReport, method="ReplicaActor.receiver_transfer")

    async def commit(self, version: int, /, *, keep_cache: bool, deadline: Deadline) -> None:
        """Make the loaded weights the replica's `version`."""
        arguments = {"version": version, "keep_cache": keep_cache}
        await self._caller.call(self._actor, "receiver_commit", arguments, deadline=deadline)

    async def abort(self, reason: str, /, *, deadline: Deadline) -> None:
        """End a transfer that is under way."""
        await self._caller.call(self._actor, "receiver_abort", {"reason": reason}, deadline=deadline)

    async def close(self, *, deadline: Deadline) -> None:
        """Remove what `prepare` created."""
        await self._caller.call(self._actor, "receiver_close", {}, deadline=deadline)


class ReplicaProxy:
    """The `Replica` behind an address."""

    def __init__(self, *, caller: Caller, address: ReplicaAddress) -> None:
        self._caller = caller
        self._address = address
        self._receiver_host = ReceiverHostProxy(caller=caller, actor=address.actor)

    @property
    def address(self) -> ReplicaAddress:
        """Where it lives."""
        return self._address

    @property
    def replica_id(self) -> str:
        """Its name."""
        return self._address.replica

    @property
    def capacity(self) -> int:
        """Sequences that it decodes at once."""
        return self._address.capacity

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What its engine claimed when it started."""
        return self._address.capabilities

    @property
    def receiver_host(self) -> WeightReceiverHost:
        """The face of its weight receiver."""
        return self._receiver_host

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence."""
        reply = await self._call("generate", {"request": request}, deadline)
        if isinstance(reply, AbortedCompletion):
            return reply
        return answer(reply, Completion, method="ReplicaActor.generate")

    async def abort(self, request_ids: Sequence[str] | None, /, *, deadline: Deadline) -> None:
        """Cut these requests, or all."""
        ids = None if request_ids is None else tuple(request_ids)
        await self._call("abort", {"request_ids": ids, "reason": "asked to"}, deadline)

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Return once nothing is decoded."""
        await self._call("pause", {"mode": mode}, deadline)

    async def resume(self, *, deadline: Deadline) -> None:
        """Decode again."""
        await self._call("resume", {}, deadline)

    async def status(self, *, deadline: Deadline) -> ReplicaStatus:
        """Return the present status."""
        return answer(await self._call("status", {}, deadline), ReplicaStatus, method="ReplicaActor.status")

    async def sleep(self, *, deadline: Deadline) -> None:
        """Free the device memory."""
        await self._call("sleep", {}, deadline)

    async def wake(self, *, deadline: Deadline) -> None:
        """Take the device memory again."""
        await self._call("wake", {}, deadline)

    async def openai_endpoint(self, *, deadline: Deadline) -> OpenAIEndpoint:
        """Return where it answers the OpenAI protocol; raises `StateError` when it does not claim `OPENAI`."""
        endpoint = await self._call("openai_endpoint", {}, deadline)
        return answer(endpoint, OpenAIEndpoint, method="ReplicaActor.openai_endpoint")

    async def load_adapter(self, name: str, /, *, folder: str, deadline: Deadline) -> None:
        """Load a LoRA adapter; raises `StateError` when it does not claim `LORA`, as the other two do."""
        await self._call("load_adapter", {"name": name, "folder": folder}, deadline)

    async def unload_adapter(self, name: str, /, *, deadline: Deadline) -> None:
        """Forget a LoRA adapter when nothing runs with it."""
        await self._call("unload_adapter", {"name": name}, deadline)

    async def adapters(self, *, deadline: Deadline) -> Sequence[str]:
        """Return the names of the LoRA adapters."""
        return answers(await self._call("adapters", {}, deadline), str, method="ReplicaActor.adapters")

    async def _call(self, method: str, arguments: dict[str, object], deadline: Deadline) -> object:
        return await self._caller.call(self._address.actor, method, arguments, deadline=deadline)


if TYPE_CHECKING:

    def _is_replica(x: ReplicaProxy) -> Replica:
        return x

    def _supports_sleep(x: ReplicaProxy) -> SupportsSleep:
        return x

    def _supports_openai(x: ReplicaProxy) -> SupportsOpenAI:
        return x

    def _supports_lora(x: ReplicaProxy) -> SupportsLora:
        return x

    def _is_host(x: ReceiverHostProxy) -> WeightReceiverHost:
        return x
