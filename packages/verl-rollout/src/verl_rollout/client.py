"""Asking for tokens: routing, failover and resumption, so that an agent loop sees none of them.

`BalancedClient` takes a lease, asks the replica, and gives the lease back with an outcome; a replica's failure is never
the caller's while another replica is left. `ResumableClient` continues what was cut. Both are built in any process by
``Class(context=ActorContext, ...)``, from arguments that can be pickled.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from verl_contracts.errors import ActorFailed, ConfigError, WaitTimeout
from verl_contracts.rollout import ABORTED, SUCCESS
from verl_contracts.tokens import AbortedCompletion, Completion
from verl_rollout.leases import LeaseDesk
from verl_rollout.remote_balancer import RemoteBalancer
from verl_rollout.replica.proxy import ReplicaProxy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import LLMClient
    from verl_contracts.runtime import ActorContext, ActorRef
    from verl_contracts.tokens import GenerationRequest, VersionSpan
    from verl_rollout.addresses import ReplicaAddress

__all__ = ["BalancedClient", "ResumableClient"]

_REQUEST_LIMIT = "actor_rollout_ref.rollout.request_limit_s"

_log = logging.getLogger(__name__)


class _ReplicaFailed(Exception):
    """The replica, not the request, is at fault."""


class BalancedClient:
    """One sequence on some replica; on another one when that fails.

    A failure is: a dead replica, an engine that raises, weights that may not answer, `request_limit_s` spent, or an
    answer without tokens. A request that can never be served (`ValueError`) is the caller's own and passes through.
    """

    def __init__(
        self,
        *,
        context: ActorContext,
        balancer: ActorRef,
        replicas: Sequence[ReplicaAddress] = (),
        request_limit_s: float = 600.0,
    ) -> None:
        self._caller = context.caller
        self._clock = context.clock
        self._balancer = RemoteBalancer(caller=context.caller, clock=context.clock, actor=balancer)
        self._request_limit_s = request_limit_s
        self._replicas = {address.replica: ReplicaProxy(caller=context.caller, address=address) for address in replicas}
        self._desk = LeaseDesk(balancer=self._balancer, clock=context.clock)

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence on some replica. Cancelling stops it there."""
        session = f"{request.key.uid}/{request.key.sample}"
        while True:
            lease = await self._desk.take(session, deadline=deadline)
            try:
                reply = await self._ask(lease.replica, request, deadline)
            except _ReplicaFailed as exc:
                # One warning per failed replica; the many requests that it takes along say the same.
                level = logging.WARNING if self._replicas.pop(lease.replica, None) is not None else logging.DEBUG
                _log.log(level, "replica %s failed, its requests go elsewhere: %s", lease.replica, exc)
                await asyncio.shield(self._desk.quarantine(lease, str(exc)))
            except BaseException:
                self._desk.give_back(lease, ABORTED)
                raise
            else:
                self._desk.give_back(lease, SUCCESS if isinstance(reply, Completion) else ABORTED)
                return reply

    async def _ask(
        self, replica_id: str, request: GenerationRequest, deadline: Deadline
    ) -> Completion | AbortedCompletion:
        """Ask one replica. Raises `_ReplicaFailed` for its failures, everything else as it is."""
        try:
            replica = await self._replica(replica_id)
            limit = deadline.within(self._clock, self._request_limit_s, setting=_REQUEST_LIMIT)
            reply = await replica.generate(request, deadline=limit)
        except ActorFailed as exc:
            raise _ReplicaFailed(exc.record.cause) from exc
        except Exception as exc:
            if isinstance(exc, ValueError) and not isinstance(exc, ConfigError):
                raise  # the request's own fault; a wrongly built actor is not
            if isinstance(exc, WaitTimeout) and deadline.remaining(self._clock) <= 0.0:
                raise  # the caller's own limit, which says nothing about the replica
            raise _ReplicaFailed(f"{type(exc).__name__}: {exc}") from exc
        num_ids = len(reply.token_ids)
        if num_ids != len(reply.logprobs) or (num_ids == 0 and isinstance(reply, Completion)):
            raise _ReplicaFailed(f"{type(reply).__name__} with {num_ids} ids and {len(reply.logprobs)} log-probs")
        return reply

    async def _replica(self, replica_id: str) -> ReplicaProxy:
        replica = self._replicas.get(replica_id)
        if replica is None:
            address = await self._balancer.locate(replica_id)
            replica = self._replicas[replica_id] = ReplicaProxy(caller=self._caller, address=address)
        return replica


class ResumableClient:
    """Continues aborted sequences, so that its caller sees whole ones.

    Each attempt asks for prompt + tokens so far, with what is left of the budget; the request and its sampling
    parameters are never changed. After `max_attempts` attempts what there is comes back as an `AbortedCompletion`.
    """

    def __init__(
        self,
        *,
        context: ActorContext,
        balancer: ActorRef,
        replicas: Sequence[ReplicaAddress] = (),
        request_limit_s: float = 600.0,
        max_attempts: int = 64,
    ) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
        self._client: LLMClient = BalancedClient(
            context=context, balancer=balancer, replicas=replicas, request_limit_s=request_limit_s
        )
        self._max_attempts = max_attempts

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence to its end, over as many attempts as it takes."""
        reply = await self._client.generate(request, deadline=deadline)
        for _ in range(1, self._max_attempts):
            if isinstance(reply, Completion):
                break
            whole = _finished(reply, request)
            if whole is not None:
                return whole
            part = await self._client.generate(_continued(request, reply), deadline=deadline)
            reply = _joined(reply, part)
        return reply


def _continued(request: GenerationRequest, so_far: AbortedCompletion) -> GenerationRequest:
    """Return the request for the rest of a sequence."""
    done = len(so_far.token_ids)
    if done == 0:
        return request
    return replace(
        request,
        prompt_ids=request.prompt_ids + so_far.token_ids,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - done),
        resumed_tokens=request.resumed_tokens + done,
    )


def _finished(so_far: AbortedCompletion, request: GenerationRequest) -> Completion | None:
    """Return a sequence that was cut after its last token as the completion that it is."""
    if so_far.token_ids and so_far.token_ids[-1] in request.sampling.stop_token_ids:
        return _completion(so_far, "stop")
    if len(so_far.token_ids) >= request.sampling.max_tokens:
        return _completion(so_far, "length")
    return None


def _completion(part: AbortedCompletion, finish_reason: Literal["stop", "length"]) -> Completion:
    return Completion(
        request_id=part.request_id,
        token_ids=part.token_ids,
        logprobs=part.logprobs,
        spans=part.spans,
        finish_reason=finish_reason,
        logprob_kind=part.logprob_kind,
        replica=part.replica,
    )


def _joined(first: AbortedCompletion, second: Completion | AbortedCompletion) -> Completion | AbortedCompletion:
    """Return both parts as one sequence that ended as the second did."""
    if first.token_ids and second.token_ids and first.logprob_kind != second.logprob_kind:
        raise ValueError(
            f"request {first.request_id}: log-probs of kind {first.logprob_kind!r} from {first.replica} and "
            f"{second.logprob_kind!r} from {second.replica} do not belong together"
        )
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        spans=_joined_spans(first.spans, second.spans, len(first.token_ids)),
    )


def _joined_spans(
    first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...], offset: int
) -> tuple[VersionSpan, ...]:
    shifted = tuple(span.shifted(offset) for span in second)
    if first and shifted and (first[-1].version, first[-1].kv_version) == (shifted[0].version, shifted[0].kv_version):
        return (*first[:-1], replace(first[-1], end=shifted[0].end), *shifted[1:])
    return first + shifted


if TYPE_CHECKING:

    def _is_client(x: BalancedClient) -> LLMClient:
        return x

    def _is_resumable(x: ResumableClient) -> LLMClient:
        return x
