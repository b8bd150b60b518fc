"""`actor_rollout_ref.actor.*` and `actor_rollout_ref.ref.*`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.convert.rows import (
    COST,
    ITSELF,
    RECORD,
    Fate,
    When,
    computed,
    fixed,
    keep,
    mapped,
    moved,
    refuse,
    same,
    under,
)
from verl_trainers.convert.settings import not_offered, offered

if TYPE_CHECKING:
    from verl_trainers.convert.rows import Decide, Row
    from verl_trainers.convert.settings import Settings

__all__ = ["ACTOR", "DTYPES"]

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "bfloat": "bfloat16"}
KL_KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
REFERENCE = When(f"{_ACTOR}.use_kl_loss")
BY_TOKENS = "micro-batches are always made by their number of tokens; gradients are the same"


def micro_batch(switch: str, target: str) -> Decide:
    """Return the translation of a micro-batch in rows into one in tokens, unless `switch` already asks for tokens."""

    def decide(value: object, settings: Settings) -> Fate:
        if not isinstance(value, int) or isinstance(value, bool):
            return keep("not set")
        if settings.get(switch):
            return keep(f"no effect while {switch} is on")
        longest = settings.number("data.max_prompt_length", 512) + settings.number("data.max_response_length", 512)
        return mapped({target: value * longest}, f"{value} rows of up to {longest} tokens each; {BY_TOKENS}")

    return decide


def token_limit(switch: str, *, rows: str) -> Decide:
    """Return the translation of a limit in tokens, which upstream reads only while `switch` is on."""

    def decide(value: object, settings: Settings) -> Fate:
        if value is not None and settings.get(rows) is not None and not settings.get(switch):
            return keep(f"no effect while {switch} is off; {rows} decides")
        return Fate(kind="same", values={ITSELF: value})

    return decide


def global_micro_batch(per_gpu: str) -> Decide:
    """Return the fate of a micro-batch over all devices, which upstream is about to drop."""

    def decide(value: object, settings: Settings) -> Fate:
        if value is None:
            return keep("not set")
        return refuse("counts rows over all devices", near=per_gpu, loses=COST)

    return decide


def clip_ratio(value: object, settings: Settings) -> Fate:
    """Translate the common clip ratio, which upstream reads only where the two bounds are null."""
    bounds = [f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"]
    unset = [bound for bound in bounds if settings.get(bound) is None]
    if not unset:
        return keep("read only where clip_ratio_low and clip_ratio_high are null; upstream sets them to 0.2")
    return mapped(dict.fromkeys(unset, value), "two bounds")


def loss_mode(value: object, settings: Settings) -> Fate:
    """Translate the name of the loss."""
    if value == "vanilla":
        return mapped({ITSELF: "ppo_clip"}, "another name; without the second clipping, clip_ratio_c")
    known = offered("verl_contracts.policy_losses", "ppo_clip")
    if isinstance(value, str) and (value in known or ":" in value or "." in value):
        return Fate(kind="same", values={ITSELF: value})
    return refuse(not_offered("policy loss", value, known), near="ppo_clip")


def warmup_ratio(value: object, settings: Settings) -> Fate:
    """Translate a share of all steps into steps."""
    if not isinstance(value, (int, float)) or value <= 0:
        return keep("no warm-up")
    if settings.number(f"{_ACTOR}.optim.lr_warmup_steps", -1) > 0:
        return keep("no effect while lr_warmup_steps is set")
    steps = settings.number("trainer.total_training_steps")
    if steps < 1:
        return refuse("the number of steps follows from the data", near=f"{_ACTOR}.optim.lr_warmup_steps, in steps")
    return mapped({f"{_ACTOR}.optim.lr_warmup_steps": int(value * steps)}, f"{value} * {steps} steps")


def warmup_steps(value: object, settings: Settings) -> Fate:
    """Translate the warm-up; a negative number leaves it to the ratio."""
    if isinstance(value, int) and value < 0:
        return keep("not set; lr_warmup_steps_ratio decides")
    return Fate(kind="same", values={ITSELF: value})


def optimizer_steps(value: object, settings: Settings) -> Fate:
    """Check that the optimizer's horizon is the run's."""
    if value in (None, -1, settings.get("trainer.total_training_steps")):
        return keep("the schedule ends with the run")
    return refuse("the schedule ends with the run", near="trainer.total_training_steps")


def old_log_prob(value: object, settings: Settings) -> Fate:
    """Translate what the ratio is taken against."""
    why = "as sampled" if value else "recomputed before the first update of a step"
    return mapped({f"{_ACTOR}.old_log_prob": "rollout" if value else "recompute"}, f"log-probs {why}")


def fsdp(*, is_reference: bool) -> tuple[Row, ...]:
    """Return the rows of the sharded engine."""
    follows = "the reference is computed like the actor"
    dtype = f"{_ACTOR}.fsdp_config.model_dtype"
    loses = COST
    return (
        fixed("fsdp_config.dtype", follows, any_value=True)
        if is_reference
        else moved("fsdp_config.dtype", dtype, DTYPES, why="type of the forward and backward pass", default="bfloat16"),
        fixed("fsdp_config.model_dtype", follows, any_value=True)
        if is_reference
        else computed("fsdp_config.model_dtype", master_dtype, why="master weights are always float32"),
        fixed("fsdp_config.mixed_precision.param_dtype", follows, any_value=True)
        if is_reference
        else moved(
            "fsdp_config.mixed_precision.param_dtype", dtype, DTYPES, why="type of the forward and backward pass"
        ),
        fixed(
            "fsdp_config.mixed_precision.**", "gradients are reduced in float32", ok=("fp32", "float32"), loses=loses
        ),
        fixed("fsdp_config.param_offload", "weights stay on their device", loses=loses),
        fixed("fsdp_config.optimizer_offload", "the optimizer stays on its device", loses=loses),
        fixed("fsdp_config.grad_offload", "gradients stay on their device", loses=loses),
        fixed("fsdp_config.offload_policy", "weights stay on their device", loses=loses),
        fixed(
            "fsdp_config.reshard_after_forward", "weights are sharded again after each pass", ok=(True,), loses=loses
        ),
        fixed("fsdp_config.fsdp_size", "weights are sharded over all training devices", ok=(-1,), loses=loses),
        fixed("fsdp_config.forward_prefetch", "PyTorch's own order", loses=loses),
        fixed("fsdp_config.wrap_policy", "each layer is sharded by itself", any_value=True),
        fixed("fsdp_config.wrap_policy.**", "each layer is sharded by itself", any_value=True),
        fixed("fsdp_config.use_orig_params", "FSDP2 keeps parameters as they are", any_value=True),
        fixed("fsdp_config.seed", "nothing random happens in the update", any_value=True),
        fixed("fsdp_config.full_determinism", "the update repeats its bits", near="deterministic=true", loses=RECORD),
        fixed("fsdp_config.ulysses_sequence_parallel_size", "a row lies on one device", ok=(1,), loses=loses),
        fixed("fsdp_config.use_torch_compile", "models run eagerly", loses=loses),
        fixed("fsdp_config.use_no_sync_for_gradient_accumulation", "gradients are reduced each time", loses=loses),
        fixed("fsdp_config.forward_only", "the engine knows", any_value=True),
        fixed("fsdp_config.strategy", "FSDP2", ok=("fsdp", "fsdp2"), loses=loses),
        fixed("fsdp_config.qat.**", "weights are not quantized", when=When(f"{_ACTOR}.fsdp_config.qat.enable")),
        fixed("fsdp_config.turbo_config.**", "FSDP2 is PyTorch's own", any_value=True),
        fixed("fsdp_config.entropy_*", "the entropy is computed in one piece", ok=(2048,), loses=loses),
        fixed("fsdp_config.pad_to_length", "rows are padded to the longest of them", loses=loses),
        fixed("fsdp_config.pad_to_length_bucket", "rows are padded to the longest of them", any_value=True),
    )


def master_dtype(value: object, settings: Settings) -> Fate:
    """Check the type of the master weights."""
    if DTYPES.get(str(value), value) == "float32":
        return keep("master weights are always float32")
    near = f"{_ACTOR}.fsdp_config.model_dtype, the type of the forward and backward pass"
    return refuse("master weights are always float32", near=near)


BOTH = (
    fixed("rollout_n", "is rollout.n", any_value=True),
    fixed("strategy", "FSDP2, and no wrapper on one device", ok=("fsdp", "fsdp2"), near="fsdp2"),
    fixed("use_torch_compile", "models run eagerly", loses=COST),
    fixed("ulysses_sequence_parallel_size", "a row lies on one device", ok=(1,), loses=COST),
    fixed("use_remove_padding", "rows of a micro-batch are padded to the longest of them", loses=COST),
    fixed("use_fused_kernels", "kernels are PyTorch's", loses=COST),
    fixed("entropy_*", "the entropy is computed in one piece", ok=(2048,), loses=COST),
    fixed("pad_to_length", "rows are padded to the longest of them", loses=COST),
)
ACTOR = (
    *under(
        _ACTOR,
        (
            same("ppo_mini_batch_size", default=256),
            same("ppo_epochs"),
            fixed("use_dynamic_bsz", BY_TOKENS, any_value=True),
            computed(
                "ppo_max_token_len_per_gpu",
                token_limit(f"{_ACTOR}.use_dynamic_bsz", rows=f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
                ITSELF,
                why="most tokens in a micro-batch, padding included",
            ),
            computed(
                "ppo_micro_batch_size_per_gpu",
                micro_batch(f"{_ACTOR}.use_dynamic_bsz", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
                f"{_ACTOR}.ppo_max_token_len_per_gpu",
                why=BY_TOKENS,
            ),
            computed(
                "ppo_micro_batch_size",
                global_micro_batch(f"{_ACTOR}.ppo_max_token_len_per_gpu"),
                why="rows over all devices",
            ),
            same("clip_ratio_low"),
            same("clip_ratio_high"),
            computed(
                "clip_ratio", clip_ratio, f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high", why="two bounds"
            ),
            fixed(
                "clip_ratio_c",
                "losses of negative advantages are not clipped a second time, which matters for ratios above that",
                default=3.0,
            ),
            same("loss_agg_mode"),
            fixed("use_token_level_loss", "is loss_agg_mode=token-mean", ok=(True,)),
            moved("loss_mode", f"{_ACTOR}.policy_loss.loss_mode", {"vanilla": "ppo_clip"}, why="the older place"),
            fixed("loss_scale_factor", "the denominator is counted", near="loss_agg_mode"),
            same("entropy_coeff"),
            same("use_kl_loss"),
            same("kl_loss_coef"),
            same("kl_loss_type", KL_KINDS),
            same("grad_clip"),
            computed("use_rollout_log_probs", old_log_prob, f"{_ACTOR}.old_log_prob", why="what the ratio is against"),
            computed("policy_loss.loss_mode", loss_mode, ITSELF, why="name of a loss"),
            fixed("policy_loss.*", "an option of another loss", any_value=True),
            fixed("tau_*", "an option of another loss", any_value=True),
            fixed("freeze_vision_tower", "models are text only"),
            fixed("calculate_entropy", "the entropy is always measured", any_value=True),
            fixed("calculate_sum_pi_squared", "is not measured", loses=RECORD),
            fixed("use_prefix_grouper", "rows of a group are computed one by one", loses=COST),
            fixed("shuffle", "rows of a step keep their order"),
            fixed("data_loader_seed", "rows of a step keep their order", any_value=True),
            fixed("state_masking", "only sampled tokens are trained", ok=(True,)),
            same("optim.lr"),
            same("optim.weight_decay"),
            same("optim.betas"),
            same("optim.eps"),
            same("optim.min_lr_ratio"),
            same("optim.lr_scheduler_type"),
            moved("optim.warmup_style", f"{_ACTOR}.optim.lr_scheduler_type", why="the older name"),
            computed("optim.lr_warmup_steps", warmup_steps, ITSELF, why="steps"),
            computed(
                "optim.lr_warmup_steps_ratio", warmup_ratio, f"{_ACTOR}.optim.lr_warmup_steps", why="steps, not a share"
            ),
            computed("optim.total_training_steps", optimizer_steps, why="the schedule ends with the run"),
            moved("optim.clip_grad", f"{_ACTOR}.grad_clip", why="largest gradient norm"),
            moved("optim.grad_clip", f"{_ACTOR}.grad_clip", why="largest gradient norm"),
            fixed("optim.optimizer", "AdamW", ok=("AdamW",)),
            fixed("optim.optimizer_impl", "PyTorch's", ok=("torch.optim",)),
            fixed("optim.num_cycles", "cosine goes down once", ok=(0.5,)),
            fixed("optim.zero_indexed_step", "warm-up begins at 0", any_value=True),
            fixed("optim.override_optimizer_config", "AdamW's own options", near="optim.betas and optim.eps"),
            fixed("optim.override_optimizer_config.**", "AdamW's own options", near="optim.betas and optim.eps"),
            *fsdp(is_reference=False),
            fixed("checkpoint.**", "only the model is saved, at the end", when=When("trainer.save_freq"), loses=RECORD),
            fixed("qat.**", "weights are not quantized", when=When(f"{_ACTOR}.qat.enable")),
            fixed("router_replay.**", "routers choose anew", when=When(f"{_ACTOR}.router_replay.mode")),
            *BOTH,
        ),
    ),
    *under(
        _REF,
        (
            computed(
                "log_prob_max_token_len_per_gpu",
                token_limit(f"{_REF}.log_prob_use_dynamic_bsz", rows=f"{_REF}.log_prob_micro_batch_size_per_gpu"),
                ITSELF,
                why="most tokens in a micro-batch, padding included",
            ),
            computed(
                "log_prob_micro_batch_size_per_gpu",
                micro_batch(f"{_REF}.log_prob_use_dynamic_bsz", f"{_REF}.log_prob_max_token_len_per_gpu"),
                f"{_REF}.log_prob_max_token_len_per_gpu",
                why=BY_TOKENS,
            ),
            computed(
                "log_prob_micro_batch_size",
                global_micro_batch(f"{_REF}.log_prob_max_token_len_per_gpu"),
                why="rows over all devices",
            ),
            fixed("log_prob_use_dynamic_bsz", BY_TOKENS, any_value=True),
            fixed("optim.**", "the reference is never trained", any_value=True),
            fixed("model.**", "the reference is the initial policy", when=REFERENCE),
            *fsdp(is_reference=True),
            *BOTH,
        ),
    ),
)
