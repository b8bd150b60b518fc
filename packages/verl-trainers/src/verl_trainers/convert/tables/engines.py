"""`actor_rollout_ref.rollout`: the inference engine, and what only engines beside the embedded one can be told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from verl_trainers.config.engine import ENGINE_OPTIONS
from verl_trainers.convert.rows import (
    COST,
    ITSELF,
    RESULT,
    SAME,
    Fate,
    Row,
    computed,
    fixed,
    keep,
    mapped,
    refuse,
)
from verl_trainers.convert.settings import ENGINES, not_offered, offered
from verl_trainers.convert.tables.actor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_trainers.convert.settings import Settings

__all__ = ["ENGINE", "ENGINE_COST", "ROLLOUT_DTYPES"]

_ROLLOUT = "actor_rollout_ref.rollout"
_EMBEDDED, _VLLM = "torch", "vllm"
_NAME, _ARGUMENTS = f"{_ROLLOUT}.name", f"{_ROLLOUT}.engine_kwargs.engine_args"
NO_OPTIONS = "the embedded engine has no options"
ENGINE_COST = "is the engine's own choice"
ROLLOUT_DTYPES = {**DTYPES, "auto": "bfloat16"}


def engine_of(settings: Settings) -> str:
    """Return the engine that generates here: upstream's if there is one of that name, else the embedded one."""
    name = settings.get(_NAME)
    return name if isinstance(name, str) and name in offered(ENGINES, _EMBEDDED) else _EMBEDDED


def engine(value: object, settings: Settings) -> Fate:
    """Translate the engine."""
    if value == engine_of(settings):
        return Fate(kind=SAME, values={ITSELF: value})
    if value == "hf":
        return mapped({ITSELF: _EMBEDDED}, "the embedded engine runs transformers models too, with a cache")
    why = not_offered("engine", value, offered(ENGINES, _EMBEDDED))
    return refuse(why, near="torch, the embedded engine", loses=COST, values={ITSELF: _EMBEDDED})


def tensor_parallel(value: object, settings: Settings) -> Fate:
    """Translate the shards of one replica."""
    if engine_of(settings) != _EMBEDDED or value == 1:
        return Fate(kind=SAME, values={ITSELF: value})
    return refuse("the embedded engine has no shards", near="1", loses=COST)


def option(otherwise: Row) -> Row:
    """Return the row of an option that engines have; for the embedded one, which has none, `otherwise` counts."""

    def decide(value: object, settings: Settings) -> Fate:
        if engine_of(settings) == _EMBEDDED:
            return otherwise.decide(value, settings)
        return keep("not set") if value is None else Fate(kind=SAME, values={ITSELF: value})

    becomes = f"same; for the embedded engine {otherwise.becomes}"
    return Row(key=otherwise.key, becomes=becomes, why=otherwise.why, decide=decide, targets=(ITSELF,))


def argument(key: str, to: str, values: Mapping[str, object] | None = None, *, why: str, embedded: bool = False) -> Row:
    """Return the row of what upstream gives to vLLM alone: it becomes `to`, here too for vLLM alone unless `embedded`.

    `values` translates those that are called differently here.
    """
    names = values or {}

    def decide(value: object, settings: Settings) -> Fate:
        if value in (None, {}):
            return keep("not set")
        if settings.get(_NAME) != _VLLM:
            return keep(f"no effect unless {_NAME} is vllm")
        if engine_of(settings) != _VLLM and not embedded:
            return refuse(NO_OPTIONS, loses=COST)
        return mapped({to: names.get(value, value) if isinstance(value, str) else value}, why)

    return computed(key, decide, to, why=why)


def closed(
    key: str,
    why: str,
    *,
    ok: tuple[object, ...] = (),
    any_value: bool = False,
    near: str = "",
    loses: str = RESULT,
) -> Row:
    """Return the row of what cannot be given to an engine, though our own options would hold it."""
    return replace(fixed(key, why, ok=ok, any_value=any_value, near=near, loses=loses), yields=False)


def own(value: object, settings: Settings) -> Fate:
    """Translate what is written in our form already."""
    if value in (None, {}):
        return keep("not set")
    if engine_of(settings) == _EMBEDDED:
        return refuse(NO_OPTIONS, loses=COST)
    return Fate(kind=SAME, values={ITSELF: value})


_OTHERS = "options of another engine"
_ITS_OWN = "an argument of vLLM itself"
_KEYED = "the same under a key of its own"
ENGINE = (
    computed("name", engine, ITSELF, why="the engine"),
    computed("tensor_model_parallel_size", tensor_parallel, ITSELF, why="shards of one replica"),
    option(fixed("data_parallel_size", "a replica is one engine", ok=(1,), near="more replicas", loses=COST)),
    option(fixed("gpu_memory_utilization", "the cache grows with what is asked for", loses=COST)),
    option(fixed("enforce_eager", ENGINE_COST, any_value=True)),
    option(fixed("enable_chunked_prefill", ENGINE_COST, any_value=True)),
    option(fixed("enable_prefix_caching", ENGINE_COST, any_value=True)),
    option(fixed("max_num_batched_tokens", ENGINE_COST, ok=(8192,), near="max_num_seqs", loses=COST)),
    argument("cudagraph_capture_sizes", f"{_ARGUMENTS}.cudagraph_capture_sizes", why=_ITS_OWN),
    *(argument(f"engine_kwargs.vllm.{name}", f"{_ROLLOUT}.{name}", why=_KEYED) for name in ENGINE_OPTIONS),
    argument("engine_kwargs.vllm.tensor_parallel_size", f"{_ROLLOUT}.tensor_model_parallel_size", why=_KEYED),
    argument("engine_kwargs.vllm.dtype", f"{_ROLLOUT}.dtype", ROLLOUT_DTYPES, why=_KEYED, embedded=True),
    argument("engine_kwargs.vllm.max_model_len", f"{_ROLLOUT}.max_model_len", why=_KEYED, embedded=True),
    argument("engine_kwargs.vllm.max_num_seqs", f"{_ROLLOUT}.max_num_seqs", why=_KEYED, embedded=True),
    argument("engine_kwargs.vllm.stream_interval", f"{_ROLLOUT}.engine_kwargs.report_interval", why=_KEYED),
    argument("engine_kwargs.vllm.max_loras", f"{_ROLLOUT}.engine_kwargs.max_loras", why=_KEYED),
    argument("engine_kwargs.vllm.max_lora_rank", f"{_ROLLOUT}.engine_kwargs.max_lora_rank", why=_KEYED),
    closed("engine_kwargs.vllm.enable_lora", "adapters need slots", ok=(False,), near="engine_kwargs.max_loras"),
    closed(
        "engine_kwargs.vllm.kv_cache_memory_bytes", "is counted in GiB", near="engine_kwargs.kv_cache_gib", loses=COST
    ),
    closed("engine_kwargs.vllm.device_ids", "the runtime places replicas", loses=COST),
    closed("engine_kwargs.vllm.enable_elastic_ep", "a replica keeps its size", ok=(False,), loses=COST),
    closed("engine_kwargs.vllm.distributed_executor_backend", ENGINE_COST, any_value=True),
    closed("engine_kwargs.vllm.enable_log_requests", "replicas report to the run", any_value=True),
    closed("engine_kwargs.vllm.enable_sleep_mode", "free_cache_engine decides", any_value=True),
    closed("engine_kwargs.vllm.skip_tokenizer_init", "token ids go in and come out", any_value=True),
    closed("engine_kwargs.vllm.disable_log_stats", "replicas report to the run", any_value=True),
    closed("engine_kwargs.vllm.disable_mm_preprocessor_cache", "prompts are text", any_value=True),
    closed("engine_kwargs.vllm.generation_config", "requests say how they are sampled", ok=("vllm",)),
    closed("engine_kwargs.vllm.load_format", "weights come by the first sync", any_value=True),
    closed(
        "engine_kwargs.vllm.logprobs_mode", "log-probs are those of what was sampled from", ok=("processed_logprobs",)
    ),
    closed("engine_kwargs.vllm.model", "the model has a key", near="actor_rollout_ref.model.path"),
    closed("engine_kwargs.vllm.seed", "random numbers follow trainer.seed", any_value=True),
    closed(
        "engine_kwargs.vllm.weight_transfer_config",
        "weights come through the checkpoint engine",
        near=f"{_ROLLOUT}.checkpoint_engine.backend",
    ),
    closed("engine_kwargs.vllm", "its arguments have names"),
    argument("engine_kwargs.vllm.**", f"{_ARGUMENTS}.**", why=_ITS_OWN),
    computed("engine_kwargs.engine_args.**", own, ITSELF, why="our own form"),
    *(closed(f"engine_kwargs.{name}", _OTHERS, loses=COST) for name in ("sglang", "trtllm")),
    computed("engine_kwargs.*", own, ITSELF, why="our own form"),
    closed("engine_kwargs.**", _OTHERS, loses=COST),
)
"""Below `actor_rollout_ref.rollout`. Of vLLM's arguments, those that `engine_args` refuses have rows of their own."""
