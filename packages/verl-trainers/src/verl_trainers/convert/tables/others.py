"""What belongs to no section of ours, and patterns that are found in many."""

from __future__ import annotations

from verl_trainers.convert.rows import COST, RECORD, When, fixed

__all__ = ["OTHERS"]

MEGATRON = "weights are sharded by FSDP2 only"

OTHER_ENGINE = When("actor_rollout_ref.actor.strategy", ("megatron", "veomni", "torchtitan"))
OTHER_OPTIMIZERS = (
    "decay_type",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "lr_decay_ratio",
    "lr_decay_steps",
    "lr_decay_style",
    "lr_min",
    "lr_start",
    "lr_warmup_init",
    "lr_wsd_decay_*",
    "main_grads_dtype",
    "min_lr",
    "min_lr_factor",
    "muon_*",
    "name",
    "use_checkpoint_opt_param_scheduler",
    "use_layer_wise_distributed_optimizer",
    "use_precision_aware_optimizer",
    "weight_decay_incr_style",
)
"""Options that only the optimizers of upstream's other engines have."""

OTHERS = (
    *(
        fixed(f"actor_rollout_ref.actor.optim.{name}", "an option of another engine's optimizer", when=OTHER_ENGINE)
        for name in OTHER_OPTIMIZERS
    ),
    fixed("defaults", "upstream's defaults that differ from ours are written out", any_value=True),
    fixed("hydra.**", "no Hydra runs here", near="verl-train run RECIPE --out DIR", loses=RECORD, ok=(None,)),
    fixed("actor_rollout_ref.hybrid_engine", "trainer.mode says where replicas live", any_value=True),
    fixed(
        "actor_rollout_ref.nccl_timeout",
        "each wait has a limit: trainer.*_limit_s",
        ok=(600,),
        near="trainer.step_limit_s",
    ),
    fixed("model_engine", MEGATRON, ok=("dp",)),
    fixed("**._target_", "names a class of upstream's own", any_value=True),
    fixed("**.profiler.**", "nothing is profiled", when=When("global_profiler.tool"), loses=RECORD),
    fixed("global_profiler.tool", "nothing is profiled", loses=RECORD),
    fixed("global_profiler.**", "nothing is profiled", when=When("global_profiler.tool"), loses=RECORD),
    *(
        fixed(f"**.{name}.**", MEGATRON, when=When("actor_rollout_ref.actor.strategy", (name,)))
        for name in ("megatron", "veomni", "torchtitan")
    ),
    *(
        row
        for name in ("rollout", "rollout_tq", "async_rollout")
        for row in (
            fixed(f"skip.{name}.enable", "every batch is generated", loses=COST),
            fixed(f"skip.{name}.**", "every batch is generated", when=When(f"skip.{name}.enable"), loses=COST),
        )
    ),
    fixed("transfer_queue.enable", "payloads stay where they were made", loses=COST),
    fixed("transfer_queue.**", "payloads stay where they were made", when=When("transfer_queue.enable"), loses=COST),
    fixed("distillation.enabled", "there is no teacher"),
    fixed("distillation.**", "there is no teacher", when=When("distillation.enabled")),
    fixed("ray_kwargs.ray_init.num_cpus", "the runtime has options of its own", near="runtime_options", loses=RECORD),
    fixed("ray_init.num_cpus", "the runtime has options of its own", near="runtime_options", loses=RECORD),
    fixed("ray_kwargs.ray_init.runtime_env.**", "processes inherit the environment", loses=RECORD),
    fixed("ray_kwargs.**", "the runtime has options of its own", near="runtime_options", loses=RECORD),
)
