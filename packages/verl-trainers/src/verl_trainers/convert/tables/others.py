"""What belongs to no section of ours, and patterns that are found in many."""

from __future__ import annotations

from verl_trainers.convert.rows import COST, RECORD, When, fixed

__all__ = ["OTHERS"]

MEGATRON = "weights are sharded by FSDP2 only"

OTHERS = (
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
