"""How much memory each role of a run needs, computed from the model's sizes and the degree of sharding.

Weights, gradients and optimizer are counted, to the byte but for small buffers; activations and KV cache are what a
full micro-batch and full sequences would take. Owns these formulas and nothing of how memory is found or judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_trainers.config.engine import devices_per_replica, engine_options
from verl_trainers.config.placing import max_model_len

if TYPE_CHECKING:
    from verl_contracts.training import ModePlan
    from verl_trainers.config.schema import RunConfig
    from verl_trainers.preflight.model import ModelFacts

__all__ = ["Part", "RoleMemory", "estimate_memory"]

_FLOAT32 = 4
_SIZES = {"float32": 4, "bfloat16": 2}
_SAVED_BY_HIDDEN = 10
"""Vectors of the hidden size that one block keeps of one token for the backward pass; see `_activations`."""
_SAVED_BY_INNER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One use of memory."""

    name: str
    num_bytes: int
    certain: bool = True
    """False when it is an upper bound, reached by full micro-batches and sequences only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """What one process of a role needs on its device."""

    role: str
    processes: int
    parts: tuple[Part, ...]

    @property
    def certain(self) -> int:
        """Bytes that are needed in any case."""
        return sum(part.num_bytes for part in self.parts if part.certain)

    @property
    def most(self) -> int:
        """Bytes at most."""
        return sum(part.num_bytes for part in self.parts)

    def of(self, name: str) -> int:
        """Return the bytes of one part, 0 when there is no such part."""
        return sum(part.num_bytes for part in self.parts if part.name == name)


def estimate_memory(config: RunConfig, plan: ModePlan, model: ModelFacts) -> tuple[RoleMemory, ...]:
    """Return the roles that need memory: the policy workers first, then the replicas."""
    placement, each = plan.placement, devices_per_replica(config.actor_rollout_ref.rollout)
    devices = placement.standalone_devices + (placement.trainer_devices if placement.hybrid else 0)
    return (
        _policy(config, model, ranks=max(1, placement.trainer_devices)),
        _replica(config, model, processes=max(1, devices // each) * each),
    )


def _policy(config: RunConfig, model: ModelFacts, *, ranks: int) -> RoleMemory:
    actor = config.actor_rollout_ref.actor
    size = _SIZES[actor.fsdp_config.model_dtype]
    share = -(-model.num_parameters // ranks)
    parts: list[Part] = []
    if ranks > 1:
        gathered = size * (model.outside_blocks + 2 * model.largest_block)
        parts += [
            Part(name="weights", num_bytes=_FLOAT32 * share),
            Part(name="gradients", num_bytes=_FLOAT32 * share),
            Part(name="optimizer", num_bytes=2 * _FLOAT32 * share),
            Part(name="gathered blocks", num_bytes=gathered, certain=False),
        ]
    elif size == _FLOAT32:
        parts += [
            Part(name="weights", num_bytes=_FLOAT32 * share),
            Part(name="gradients", num_bytes=_FLOAT32 * share),
            Part(name="optimizer", num_bytes=2 * _FLOAT32 * share),
        ]
    else:  # a narrow copy computes; float32 masters and their gradients lie beside it
        parts += [
            Part(name="weights", num_bytes=size * share),
            Part(name="gradients", num_bytes=(size + _FLOAT32) * share),
            Part(name="optimizer", num_bytes=3 * _FLOAT32 * share),
        ]
    if actor.use_kl_loss:
        parts.append(Part(name="reference model", num_bytes=(size if ranks == 1 else _FLOAT32) * share))
    parts.append(Part(name="activations", num_bytes=_activations(config, model, ranks, size), certain=False))
    parts.append(_wire(config, model))
    return RoleMemory(role="policy worker", processes=ranks, parts=tuple(parts))


def _replica(config: RunConfig, model: ModelFacts, *, processes: int) -> RoleMemory:
    """Return what one device of a replica needs. Each copy of the model takes `max_num_seqs` sequences."""
    rollout = config.actor_rollout_ref.rollout
    size, shards = _SIZES[rollout.dtype], max(1, rollout.tensor_model_parallel_size)
    tokens = rollout.max_num_seqs * max_model_len(config)
    return RoleMemory(
        role="replica" if shards == 1 else f"replica shard (1 of {shards})",
        processes=processes,
        parts=(
            Part(name="weights", num_bytes=size * -(-model.num_parameters // shards)),
            _cache(engine_options(rollout).get("kv_cache_gib"), size * tokens * model.kv_elements // shards),
            _wire(config, model),
        ),
    )


def _cache(chosen: object, most: int) -> Part:
    """Return the KV cache: the GiB that were chosen, or at most what all sequences can fill."""
    if isinstance(chosen, (int, float)) and chosen > 0:
        return Part(name="KV cache", num_bytes=int(chosen * 2**30))
    return Part(name="KV cache", num_bytes=most, certain=False)


def _activations(config: RunConfig, model: ModelFacts, ranks: int, size: int) -> int:
    """Return what the backward pass needs of one micro-batch.

    Of each token a block keeps about ten vectors of the hidden size (two norms and their inputs, queries, the output of
    attention, its projection, residuals), keys and values, and four of the inner size (gate, its activation, up, their
    product). Logits exist for answers only, once more as their gradient.
    """
    actor, data, rollout = config.actor_rollout_ref.actor, config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    rows = -(-(actor.ppo_mini_batch_size or data.train_batch_size) * rollout.n // ranks)
    tokens = min(max(longest, actor.ppo_max_token_len_per_gpu), rows * longest)
    answers = tokens * data.max_response_length // longest
    block = _SAVED_BY_HIDDEN * model.hidden_size + _SAVED_BY_INNER * model.intermediate_size
    block += 2 * model.num_kv_heads * model.head_dim
    return size * (tokens * model.num_layers * block + 2 * answers * model.vocab_size)


def _wire(config: RunConfig, model: ModelFacts) -> Part:
    """Return the buffer that weights go through: a bucket, and room for a tensor that is larger than one."""
    rollout = config.actor_rollout_ref.rollout
    size, bucket = _SIZES[rollout.dtype], rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    num_bytes = min(size * model.num_parameters, bucket + size * model.largest_tensor)
    return Part(name="weight wire buffer", num_bytes=num_bytes)
