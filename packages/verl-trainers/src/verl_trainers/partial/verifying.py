"""Do the replicas compute what the trainer computes, with the weights that it sent? Asked of a sync, without a run.

Replicas begin with weights that are anybody's guess, so what they compute afterwards came with the sync. Digests prove
that the bytes arrived; this proves that each went where it belongs: names, fused and tied parameters. The second
sync carries other weights, since an engine may well take the first ones right and keep a part of them for ever.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from typing import TYPE_CHECKING

from verl_contracts.clock import Deadline
from verl_contracts.errors import RunFailed
from verl_contracts.samples import Trajectory
from verl_contracts.tokens import Completion, GenerationRequest, SampleKey, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock
    from verl_contracts.rollout import LLMServerManager, Replica
    from verl_contracts.samples import Prompt
    from verl_contracts.tokens import AbortedCompletion
    from verl_contracts.training import DataSource
    from verl_contracts.weights import CheckpointEngineManager
    from verl_trainers.workers.group import PolicyWorkerGroup

__all__ = ["verify_syncs"]

_log = logging.getLogger(__name__)

_PROMPTS = 4
"""Prompts that each replica answers, or as many as there are."""
_SCALE = 0.1
"""Part of each weight by which the second sync changes it, up or down."""


async def verify_syncs(
    workers: PolicyWorkerGroup,
    servers: LLMServerManager,
    checkpoint: CheckpointEngineManager,
    data: DataSource,
    *,
    temperature: float,
    max_tokens: int,
    limit: float,
    limit_s: float,
    clock: Clock,
) -> list[float]:
    """Return mean |log-prob of a replica - log-prob of the trainer| in nats a token, of each replica and sync.

    `limit` is what it must stay below, and `limit_s` how long each sync and each question may take. Raises `RunFailed`
    naming the replica.
    """
    prompts = [prompt for prompt in (data.next() for _ in range(_PROMPTS)) if prompt is not None]
    found: list[float] = []
    for version in (0, 1):
        if version:
            await workers.perturb(_SCALE, deadline=Deadline.after(clock, limit_s))
        report = await checkpoint.update_weights(version, deadline=Deadline.after(clock, limit_s))
        await servers.admit([row.replica for row in report.replicas if row.committed])
        for row in report.replicas:
            if not row.committed:
                raise RunFailed(f"{row.replica} did not take version {version}, in phase {row.phase}: {row.error}")
        for replica in servers.replicas():
            deadline = Deadline.after(clock, limit_s)
            answers = await _ask(replica, prompts, version, temperature, max_tokens, deadline)
            differences = _differences(answers, await workers.log_probs(answers, deadline=deadline))
            mean = statistics.fmean(differences)
            name = replica.replica_id
            _log.info(
                "%s at version %d: %d tokens, log-probs differ by %.2g on average and %.2g at most",
                name,
                version,
                len(differences),
                mean,
                max(differences),
            )
            found.append(mean)
            if not mean <= limit:
                raise RunFailed(
                    f"{name} holds version {version} to the byte, and its log-probs differ from the trainer's by "
                    f"{mean:.3g} nats a token, where {limit:g} is the limit "
                    "(actor_rollout_ref.rollout.logprob_diff_limit): its engine puts some tensors elsewhere, or "
                    "computes otherwise"
                )
    return found


async def _ask(
    replica: Replica, prompts: Sequence[Prompt], version: int, temperature: float, max_tokens: int, deadline: Deadline
) -> list[Trajectory]:
    """Let one replica answer all prompts."""
    requests = [
        GenerationRequest(
            request_id=f"verify-{replica.replica_id}-{version}-{number}",
            prompt_ids=prompt.prompt_ids,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
            key=SampleKey(uid=f"verify-{number}", sample=0, turn=version),
        )
        for number, prompt in enumerate(prompts)
    ]
    replies = await asyncio.gather(*(replica.generate(request, deadline=deadline) for request in requests))
    return [_trajectory(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]


def _trajectory(prompt: Prompt, reply: Completion | AbortedCompletion) -> Trajectory:
    if not isinstance(reply, Completion):
        raise RunFailed(f"{reply.replica} did not complete request {reply.request_id}")
    before = len(prompt.prompt_ids)
    return Trajectory(
        ids=(*prompt.prompt_ids, *reply.token_ids),
        loss_mask=(0,) * before + (1,) * len(reply.token_ids),
        logprobs=(0.0,) * before + tuple(reply.logprobs),
        spans=tuple(span.shifted(before) for span in reply.spans),
        logprob_kind=reply.logprob_kind,
        prompt_length=before,
    )


def _differences(answers: Sequence[Trajectory], log_probs: Sequence[Sequence[float]]) -> list[float]:
    """Return |difference| of each sampled token."""
    return [
        abs(mine - its)
        for answer, values in zip(answers, log_probs, strict=True)
        for mine, its, sampled in zip(values, answer.logprobs, answer.loss_mask, strict=True)
        if sampled
    ]
