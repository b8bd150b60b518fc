"""What the chosen inference engine is told, how many devices one replica of it takes, and what it may not be told.

Owns the rule that an option has one value: verl gives some options of an engine keys of their own, and the others stand
in `engine_kwargs`. Knows no engine but the embedded one, which has no options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from verl_trainers.config.mistakes import Mistake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_trainers.config.schema import RolloutConfig, RunConfig

__all__ = [
    "ENGINE_OPTIONS",
    "PER_REPLICA",
    "check_engine",
    "devices_per_replica",
    "engine_options",
    "logprob_diff_limit",
    "option_keys",
    "product",
]

_ROLLOUT: Final = "actor_rollout_ref.rollout"
_KWARGS: Final = f"{_ROLLOUT}.engine_kwargs"
_EMBEDDED: Final = "torch"
_COPIES: Final = "data_parallel_size"

ENGINE_OPTIONS: Final = (
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    _COPIES,
)
"""Options of engines that are keys of their own; null leaves one to the engine."""

PER_REPLICA: Final = (f"{_ROLLOUT}.tensor_model_parallel_size", f"{_ROLLOUT}.{_COPIES}")
"""Keys whose product is the devices of one replica."""

LOGPROB_DIFF_LIMITS: Final = {"float32": 1e-2, "bfloat16": 0.2}
"""Mean difference in nats between right implementations, with room: some 1e-5 and 0.04 were measured."""


def engine_options(rollout: RolloutConfig) -> dict[str, object]:
    """Return the options of the engine: `engine_kwargs`, and the keys of their own that are not null."""
    return {**rollout.engine_kwargs, **_own(rollout)}


def option_keys(rollout: RolloutConfig) -> tuple[str, ...]:
    """Return the full keys that `engine_options` come from."""
    return (_KWARGS, *(f"{_ROLLOUT}.{name}" for name in _own(rollout)))


def devices_per_replica(rollout: RolloutConfig) -> int:
    """Return the devices of one replica: the shards of a copy of the model, times the copies."""
    return max(1, rollout.tensor_model_parallel_size) * _copies(rollout)


def product(rollout: RolloutConfig) -> str:
    """Return how the devices of one replica come about, for messages: keys, and numbers."""
    shards, copies = rollout.tensor_model_parallel_size, _copies(rollout)
    if copies == 1:
        return f"{PER_REPLICA[0]}={shards}"
    return f"{' * '.join(PER_REPLICA)} = {shards} * {copies} = {shards * copies}"


def logprob_diff_limit(config: RunConfig) -> float:
    """Return the limit that is set, or the one for the coarser of the two types that log-probs are computed in."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    by_type = max(LOGPROB_DIFF_LIMITS[dtype] for dtype in (rollout.dtype, actor.fsdp_config.model_dtype))
    return by_type if rollout.logprob_diff_limit is None else rollout.logprob_diff_limit


def check_engine(config: RunConfig) -> Iterator[Mistake]:
    """Yield what the engine cannot be told, and devices that do not divide into replicas."""
    rollout = config.actor_rollout_ref.rollout
    if config.deterministic and rollout.name != _EMBEDDED:
        yield Mistake(
            key="deterministic",
            text=f"needs the embedded engine, {_ROLLOUT}.name=torch, got {rollout.name}; other engines repeat no bits",
            uses=(f"{_ROLLOUT}.name",),
        )
    if rollout.name == _EMBEDDED:
        yield from _check_embedded(rollout)
        return
    for name, value in _own(rollout).items():
        if name in rollout.engine_kwargs and rollout.engine_kwargs[name] != value:
            yield Mistake(
                key=f"{_KWARGS}.{name}",
                text=f"is {rollout.engine_kwargs[name]!r}, and {_ROLLOUT}.{name} is {value!r}: they are one option; "
                "set one of them",
                uses=(f"{_ROLLOUT}.{name}",),
            )
    if isinstance(rollout.engine_kwargs.get(rollout.name), Mapping):
        yield Mistake(
            key=f"{_KWARGS}.{rollout.name}",
            text=f"is verl's form; here all of engine_kwargs are those of {_ROLLOUT}.name={rollout.name}, and what "
            f"verl has in that section is {_KWARGS}.engine_args",
            uses=(f"{_ROLLOUT}.name",),
        )
    devices, each = rollout.n_gpus_per_node, devices_per_replica(rollout)
    if devices is not None and devices >= 1 and rollout.tensor_model_parallel_size >= 1 and devices % each != 0:
        yield Mistake(
            key=f"{_ROLLOUT}.n_gpus_per_node",
            text=f"must be a multiple of {product(rollout)} ({devices} % {each} = {devices % each})",
            uses=PER_REPLICA,
        )


def _check_embedded(rollout: RolloutConfig) -> Iterator[Mistake]:
    uses = (f"{_ROLLOUT}.name",)
    if rollout.tensor_model_parallel_size > 1:
        yield Mistake(
            key=PER_REPLICA[0],
            text=f"must be 1 for {_ROLLOUT}.name=torch, got {rollout.tensor_model_parallel_size}: the embedded engine "
            "has no shards",
            uses=uses,
        )
    wrong = [f"{_ROLLOUT}.{name}" for name in _own(rollout)] + [f"{_KWARGS}.{name}" for name in rollout.engine_kwargs]
    for key in wrong:
        text = f"is an option of other engines; the embedded engine, {_ROLLOUT}.name=torch, has none; leave it out"
        yield Mistake(key=key, text=text, uses=uses)


def _own(rollout: RolloutConfig) -> dict[str, object]:
    """Return the options that are set by keys of their own."""
    values: dict[str, object] = {name: getattr(rollout, name) for name in ENGINE_OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def _copies(rollout: RolloutConfig) -> int:
    """Return the copies of the model in one replica; a number that cannot be one is refused elsewhere."""
    copies = engine_options(rollout).get(_COPIES)
    return copies if isinstance(copies, int) and not isinstance(copies, bool) and copies >= 1 else 1
