"""Every key of a run, as frozen dataclasses. Key paths follow verl's where verl has them.

A field's default is the value of an absent key. A field whose type includes None may be null, and its docstring says
what null means; null for any other leaf is an error. Sections may be absent, null or empty, which all mean defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.rollout import PauseMode
    from verl_contracts.training import LossAggregation

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "AsyncConfig",
    "CheckpointEngineConfig",
    "CustomRewardConfig",
    "DataConfig",
    "FsdpConfig",
    "ModelConfig",
    "OptimConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainerConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`data.*`: what is trained and validated on."""

    train_files: tuple[str, ...] = ()
    """JSONL or parquet files with verl's columns. Required."""
    val_files: tuple[str, ...] = ()
    """Held-out files; empty means no validation."""
    rollout_files: tuple[str, ...] = ()
    """Files that `trainer.rollout_only` wrote: their samples are trained on, and no replica is started; empty means
    that samples are generated."""
    prompt_key: str = "prompt"
    """Column with a string or a list of chat messages."""
    max_prompt_length: int = 512
    """Tokens."""
    max_response_length: int = 512
    """Tokens, over all turns."""
    train_batch_size: int = 16
    """Groups in one step."""
    shuffle: bool = True
    seed: int = 0
    """Order of the rows."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length`, with a count; otherwise they are an error."""
    system_prompt: str | None = None
    """Put before each chat; null adds none."""
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`actor_rollout_ref.model.*`."""

    path: str = ""
    """Hugging Face folder. Required."""
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """`actor_rollout_ref.actor.optim.*`: AdamW."""

    lr: float = 1e-6
    lr_warmup_steps: int = 0
    """Steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.0
    """Cosine ends at this part of `lr`."""
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossConfig:
    """`actor_rollout_ref.actor.policy_loss.*`."""

    loss_mode: str = "ppo_clip"
    """Name or class path of a `PolicyLoss`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Further keyword arguments for its constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    """`actor_rollout_ref.actor.fsdp_config.*`."""

    model_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass. Master weights are always float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """`actor_rollout_ref.actor.*`: the policy update."""

    ppo_mini_batch_size: int | None = None
    """Groups in one optimizer step; null means the whole batch, one update a step."""
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens, padding included, in one micro-batch of one rank."""
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    loss_agg_mode: LossAggregation = "token-mean"
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    grad_clip: float = 1.0
    """Largest gradient norm."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """What the ratio is taken against: log-probs as sampled, or recomputed before the first update of the step."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefConfig:
    """`actor_rollout_ref.ref.*`: the reference policy of the KL term, always the initial policy."""

    log_prob_max_token_len_per_gpu: int | None = None
    """Most tokens in one micro-batch; null means the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """`actor_rollout_ref.rollout.val_kwargs.*`: how validation samples."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    """Most candidates; null keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """`actor_rollout_ref.rollout.agent.*`."""

    num_workers: int = 1
    default_agent_loop: str = "single_turn"
    """Name or class path of an `AgentLoop`."""
    agent_loop_options: Mapping[str, object] = field(default_factory=dict)
    agent_loop_manager_class: str | None = None
    """Name or class path of an `AgentLoopManager`; null means the default one."""
    agent_loop_manager_options: Mapping[str, object] = field(default_factory=dict)
    sample_limit_s: float = 300.0
    """Longest that one sample may take, reward included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEngineConfig:
    """`actor_rollout_ref.rollout.checkpoint_engine.*`."""

    backend: str = "shm"
    """Name or class path of a `WeightBackend`."""
    update_weights_bucket_megabytes: int = 32
    verification: Literal["full", "sampled"] = "full"
    """How much of a payload is hashed on both sides: all, or a window of each stretch, for a transfer that the same
    cores bound. Order, counts, shapes and types are always checked."""
    engine_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Options of the checkpoint-engine manager."""
    phase_limit_s: float = 60.0
    min_healthy: int = 1
    replicas_at_once: int | None = None
    """Most replicas that a sync pauses at the same time; the others go on with the weights before, and their turn
    comes next. Null means all at once, which gathers the weights only once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """`actor_rollout_ref.rollout.*`."""

    name: str = "torch"
    """Inference engine: `torch`, the embedded one, `vllm`, or a class path."""
    engine_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Further options of the engine, by its own names; the embedded one has none."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU that the engine may take, weights included, above 0 and at most 1; null means the engine's
    default. With `free_cache_engine` the trainer gets it back while it trains; else both shares must fit."""
    enforce_eager: bool | None = None
    """Whether nothing is compiled and captured; null means the engine's default."""
    enable_prefix_caching: bool | None = None
    """Whether a prompt that a group shares is computed once; null means the engine's default."""
    enable_chunked_prefill: bool | None = None
    """Whether long prompts are computed in pieces beside what is decoded; null means the engine's default."""
    max_num_batched_tokens: int | None = None
    """Most tokens that the engine computes in one iteration, over all sequences; null means the engine's default."""
    n: int = 8
    """Samples in a group."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    """Most candidates; null keeps all."""
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor_model_parallel_size: int = 1
    """Devices that share one copy of the model."""
    data_parallel_size: int | None = None
    """Copies of the model in one replica, which has `tensor_model_parallel_size` devices for each; null means the
    engine's default, which is 1."""
    max_model_len: int | None = None
    """Tokens; null means prompt and response lengths together."""
    max_num_seqs: int = 64
    n_gpus_per_node: int | None = None
    """Devices for replicas of their own; null means what the mode needs at least, in whole replicas."""
    partial_rollout: bool = True
    """Whether aborted sequences are continued."""
    llm_server_manager_class: str | None = None
    """Name or class path of an `LLMServerManager`; null means the default one."""
    llm_server_manager_options: Mapping[str, object] = field(default_factory=dict)
    checkpoint_manager_class: str | None = None
    """Name or class path of a `CheckpointEngineManager`; null means the default one."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    request_limit_s: float = 600.0
    free_cache_engine: bool | None = None
    """Whether replicas that share the trainer's devices sleep while it trains; null means no."""
    logprob_diff_limit: float | None = None
    """Mean |log-prob as sampled - log-prob of the trainer| of a step, in nats a token of equal weights, above which the
    run warns once; null means 0.01 in float32 and 0.2 where replicas or trainer compute in bfloat16. Right engines
    differ by some 1e-5 and 0.04; weights that did not arrive, or log-probs of another kind, by more than the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRolloutRefConfig:
    """`actor_rollout_ref.*`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """`algorithm.*`."""

    adv_estimator: str = "grpo"
    """Name or class path of an `AdvantageEstimator`."""
    norm_adv_by_std_in_grpo: bool = True
    options: Mapping[str, object] = field(default_factory=dict)
    """Further keyword arguments for the estimator's constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomRewardConfig:
    """`reward.custom_reward_function.*`: a function of one's own in verl's form."""

    path: str | None = None
    """Python file; null means that `reward.name` decides."""
    name: str = "compute_score"
    """Function in that file: ``(data_source, solution_str, ground_truth, extra_info)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """`reward.*`."""

    name: str | None = None
    """Name or class path of a `RewardFunction`; null needs `custom_reward_function.path`."""
    options: Mapping[str, object] = field(default_factory=dict)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    num_processes: int = 1
    """Child processes per agent-loop worker."""
    limit_s: float = 10.0
    """Longest that one reward may run; its process is killed then."""
    start_limit_s: float = 60.0
    """Longest that loading the reward function may take in one of its processes."""
    unusable: Literal["refill", "train_rest", "raise"] = "refill"
    """A group with unscored samples: replace it by another prompt, train the rest of it, or stop."""
    max_unusable_ratio: float = 0.5
    """Part of groups that may be unusable before the run stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncConfig:
    """`async_training.*`: only for modes that overlap."""

    max_staleness: int | None = None
    """k; null means the mode's default."""
    sync_every: int | None = None
    """Steps between weight syncs; null means the mode's default."""
    pause_mode: PauseMode | None = None
    """What a sync does to running sequences; null means the mode's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """`trainer.*`."""

    mode: str = "fully_async"
    """Name or class path of a `TrainerMode`."""
    total_training_steps: int | None = None
    """Null means as many as `total_epochs` give."""
    total_epochs: int = 1
    """Passes over the data; with `total_training_steps` set, data is repeated as often as needed."""
    n_gpus_per_node: int = 1
    """Devices that train; on CPU a device is a core."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    device_memory_gb: float | None = None
    """GiB that one device has, for the estimate of memory; null means what is found on this machine."""
    seed: int = 0
    test_freq: int = -1
    """Steps between validations; -1 means only before the first step and after the last."""
    val_before_train: bool = True
    verify_only: bool = False
    """Only bring the replicas to the starting weights, and to changed ones, and compare their log-probs with the
    trainer's: whether each tensor came to its place in this engine."""
    val_only: bool = False
    """Whether the run validates the weights it starts from, and ends."""
    rollout_only: bool = False
    """Whether the run generates and scores the groups of all its steps, writes them to ``rollouts.jsonl`` for
    `data.rollout_files`, and trains on none."""
    logger: tuple[str, ...] = ("jsonl",)
    """Names or class paths of trackers. ``jsonl`` is there in any case, named or not."""
    logger_options: Mapping[str, object] = field(default_factory=dict)
    """Options of trackers, by the name that stands in `logger`, or the bare name of the class:
    ``{wandb: {project: mine}}``."""
    logger_limit_s: float = 30.0
    """Longest that a tracker may take to start and to close. While training, none is waited for."""
    step_limit_s: float = 1800.0
    """Longest that one step may take."""
    start_limit_s: float = 300.0
    """Longest that starting may take."""
    sync_limit_s: float = 600.0
    """Longest that one weight sync may take."""
    wait_limit_s: float = 1800.0
    """Longest that the trainer may wait for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    async_training: AsyncConfig = field(default_factory=AsyncConfig)
    runtime: str = "ray"
    """Name or class path of a `Runtime`: `ray` or `local`."""
    runtime_options: Mapping[str, object] = field(default_factory=dict)
    deterministic: bool = False
    """Whether the same run gives the same bits; embedded engine only."""
    prepare: str | None = None
    """``package.module:function`` called with a folder, to make models and data there; null calls nothing."""
