"""`actor_rollout_ref.rollout.*`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.convert.rows import (
    COST,
    ITSELF,
    RECORD,
    SAME,
    Fate,
    When,
    computed,
    fixed,
    keep,
    mapped,
    refuse,
    same,
    under,
)
from verl_trainers.convert.settings import not_offered, offered
from verl_trainers.convert.tables.engines import ENGINE, ENGINE_COST, ROLLOUT_DTYPES

if TYPE_CHECKING:
    from verl_trainers.convert.settings import Settings

__all__ = ["ROLLOUT"]

_ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = When(f"{_ROLLOUT}.multi_turn.enable")
NEAR_TOOLS = f"an agent loop of your own: {_ROLLOUT}.agent.default_agent_loop"


def top_k(value: object, settings: Settings) -> Fate:
    """Translate the number of candidates, of which upstream writes "all" as -1 or 0."""
    if isinstance(value, int) and value <= 0:
        return mapped({ITSELF: None}, f"{value} keeps all, which is null here")
    return Fate(kind=SAME, values={ITSELF: value})


def own_devices(value: object, settings: Settings) -> Fate:
    """Translate devices of replicas alone, on all nodes together."""
    if not settings.has_own_replicas:
        return keep("replicas share the trainer's devices")
    section = _ROLLOUT if settings.number(f"{_ROLLOUT}.nnodes") > 0 else "rollout"
    nodes, each = settings.number(f"{section}.nnodes", 1), settings.number(f"{section}.n_gpus_per_node", 8)
    if nodes == 1 and section == _ROLLOUT:
        return Fate(kind=SAME, values={f"{_ROLLOUT}.n_gpus_per_node": each})
    why = "another place" if nodes == 1 else f"{nodes} nodes * {each} devices: one number for all nodes"
    return mapped({f"{_ROLLOUT}.n_gpus_per_node": nodes * each}, why)


def own_nodes(value: object, settings: Settings) -> Fate:
    """Translate the number of nodes that hold replicas alone."""
    if isinstance(value, int) and value <= 1:
        return keep("n_gpus_per_node counts the devices of all nodes")
    return own_devices(value, settings)


def sleeping(value: object, settings: Settings) -> Fate:
    """Translate whether replicas give their memory back."""
    if value and settings.has_own_replicas:
        return keep("replicas with devices of their own never give them back")
    return Fate(kind=SAME, values={ITSELF: value})


def prompt_length(value: object, settings: Settings) -> Fate:
    """Check that one limit holds for data and engine."""
    return _length(value, settings, "data.max_prompt_length")


def response_length(value: object, settings: Settings) -> Fate:
    """Check that one limit holds for data and engine."""
    return _length(value, settings, "data.max_response_length")


def _length(value: object, settings: Settings, key: str) -> Fate:
    if value is None or value == settings.number(key, 512):
        return keep(f"is {key}")
    return refuse(f"is {key}, which says {settings.number(key, 512)}", near=key)


def agent_loop(value: object, settings: Settings) -> Fate:
    """Translate the name of an agent loop."""
    if value == "single_turn_agent":
        return mapped({ITSELF: "single_turn"}, "another name")
    known = offered("verl_contracts.agent_loops", "single_turn")
    name = str(value).removesuffix("_agent")
    if isinstance(value, str) and (value in known or "." in value):
        return Fate(kind=SAME, values={ITSELF: value})
    if name in known:
        return mapped({ITSELF: name}, "another name")
    return refuse(not_offered("agent loop", value, known), near=NEAR_TOOLS)


def backend(value: object, settings: Settings) -> Fate:
    """Translate the way that weights take."""
    known = offered("verl_contracts.weight_backends", "shm")
    if isinstance(value, str) and value in known and value != "naive":
        return Fate(kind=SAME, values={ITSELF: value})
    if value == "naive":
        return mapped({ITSELF: "shm"}, "weights always cross from process to process, here through shared memory")
    return refuse(not_offered("backend", value, known), near="shm, on one host", loses=COST, values={ITSELF: "shm"})


ROLLOUT = under(
    _ROLLOUT,
    (
        *ENGINE,
        same("n", default=1),
        same("temperature"),
        same("top_p"),
        computed("top_k", top_k, ITSELF, why="null keeps all"),
        same("dtype", ROLLOUT_DTYPES, default="bfloat16"),
        same("max_model_len"),
        same("max_num_seqs", default=256),
        computed("free_cache_engine", sleeping, ITSELF, why="sleep while the trainer trains", default=True),
        computed("nnodes", own_nodes, f"{_ROLLOUT}.n_gpus_per_node", why="one number for all nodes"),
        computed("n_gpus_per_node", own_devices, ITSELF, why="one number for all nodes"),
        same("val_kwargs.n"),
        same("val_kwargs.temperature"),
        same("val_kwargs.top_p"),
        computed("val_kwargs.top_k", top_k, ITSELF, why="null keeps all"),
        fixed("val_kwargs.do_sample", "val_kwargs.temperature decides; 0 is greedy", any_value=True),
        fixed("do_sample", "training always samples", ok=(True,), near=f"{_ROLLOUT}.temperature"),
        fixed("seed", "random numbers follow trainer.seed", any_value=True),
        fixed("full_determinism", "random numbers follow the prompt", near="deterministic=true", loses=RECORD),
        computed("prompt_length", prompt_length, why="must be data.max_prompt_length"),
        computed("response_length", response_length, why="must be data.max_response_length"),
        fixed("mode", "requests are always asynchronous", any_value=True),
        fixed("ignore_eos", "a sequence ends with its end token"),
        fixed("calculate_log_probs", "the log-prob of each token is always kept", any_value=True),
        fixed("logprobs_mode", "log-probs are those of what was sampled from", ok=("processed_logprobs",)),
        fixed("skip_tokenizer_init", "token ids go in and come out", any_value=True),
        fixed("standalone_gpu_memory_utilization", "all replicas take the same share", loses=COST),
        fixed("scheduling_policy", "first come, first served", ok=("fcfs",), loses=COST),
        fixed("load_format", "weights come by the first sync", any_value=True),
        fixed("layered_summon", "weights are gathered one by one", any_value=True),
        fixed("disable_log_stats", "replicas report to the run", any_value=True),
        fixed("over_sample_rate", "as many are generated as are trained", ok=(0,)),
        fixed("multi_stage_wake_up", "memory comes back in one piece", loses=COST),
        fixed("expert_parallel_size", "a replica has no shards of experts", ok=(1,), loses=COST),
        fixed("pipeline_model_parallel_size", "a replica has no stages", ok=(1,), loses=COST),
        fixed("log_prob_*", "log-probs are recomputed in the actor's micro-batches", any_value=True),
        fixed("router_config_path", "replicas are chosen by load", loses=COST),
        fixed("limit_images", "prompts are text"),
        fixed("swap_space", ENGINE_COST, any_value=True),
        fixed("use_fire_sampling", "all tokens have one temperature"),
        fixed(
            "update_weights_bucket_megabytes", "is checkpoint_engine.update_weights_bucket_megabytes", any_value=True
        ),
        fixed("multi_turn.enable", "there are no tools yet", near=NEAR_TOOLS),
        fixed("multi_turn.**", "there are no tools yet", when=TOOLS, near=NEAR_TOOLS),
        same("agent.num_workers"),
        computed("agent.default_agent_loop", agent_loop, ITSELF, why="name of an agent loop"),
        fixed(
            "agent.agent_loop_config_path", "a loop is named by class path", near=f"{_ROLLOUT}.agent.default_agent_loop"
        ),
        fixed("agent.custom_async_server.name", "servers are a plug-in", any_value=True),
        fixed("agent.custom_async_server.**", "servers are a plug-in", near=f"{_ROLLOUT}.llm_server_manager_class"),
        computed("checkpoint_engine.backend", backend, ITSELF, why="name of a backend"),
        same("checkpoint_engine.update_weights_bucket_megabytes"),
        fixed("checkpoint_engine.engine_kwargs.**", "each backend has options of its own", loses=COST),
        fixed(
            "checkpoint_engine.custom_backend_module",
            "a backend is named by class path",
            near="checkpoint_engine.backend",
        ),
        fixed("trace.backend", "samples are written to samples.jsonl", loses=RECORD),
        fixed("trace.**", "samples are written to samples.jsonl", when=When(f"{_ROLLOUT}.trace.backend"), loses=RECORD),
        fixed("prometheus.**", "metrics go to the trackers", when=When(f"{_ROLLOUT}.prometheus.enable"), loses=RECORD),
        fixed("enable_rollout_routing_replay", "routers choose anew"),
        fixed("moe_load_balance_metrics_interval", "is not measured", ok=(0,), loses=RECORD),
        fixed("quantization", "weights are not quantized"),
        fixed("quantization_config_file", "weights are not quantized"),
        fixed("qat", "is the actor's", any_value=True),
        fixed("mtp", "is the model's", any_value=True),
        fixed("qat.**", "weights are not quantized", when=When(f"{_ROLLOUT}.qat.enable")),
        fixed("mtp.**", "no layer predicts more than one token", when=When(f"{_ROLLOUT}.mtp.enable")),
        fixed("disaggregation.**", "one engine prefills and decodes", when=When(f"{_ROLLOUT}.disaggregation.enabled")),
    ),
)
