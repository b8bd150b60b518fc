"""`trainer.*`."""

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
from verl_trainers.convert.settings import is_legal, not_offered, offered
from verl_trainers.convert.tables.data import step_groups

if TYPE_CHECKING:
    from verl_trainers.convert.rows import Decide
    from verl_trainers.convert.settings import Settings

__all__ = ["TRAINER"]

_FREQ = "trainer.test_freq"
_OUT = "verl-train run RECIPE --out DIR"
SAVED = When("trainer.save_freq")


def devices(value: object, settings: Settings) -> Fate:
    """Translate the training devices: one number for all nodes."""
    nodes, each = settings.number("trainer.nnodes", 1), settings.number("trainer.n_gpus_per_node", 8)
    if nodes == 1 or is_legal("trainer.nnodes"):
        return Fate(kind=SAME, values={ITSELF: each})
    return mapped({ITSELF: nodes * each}, f"{nodes} nodes * {each} devices: one number for all nodes")


def nodes(value: object, settings: Settings) -> Fate:
    """Translate the number of nodes."""
    if is_legal("trainer.nnodes"):
        return Fate(kind=SAME, values={ITSELF: value})
    if value == 1:
        return keep("n_gpus_per_node counts the devices of all nodes")
    fate = devices(value, settings)
    return mapped({"trainer.n_gpus_per_node": fate.values[ITSELF]}, fate.why)


def logger(value: object, settings: Settings) -> Fate:
    """Translate the trackers; what is logged goes to metrics.jsonl in any case, and progress to the terminal."""
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    known = offered("verl_contracts.trackers", "jsonl")
    kept = ["jsonl", *(name for name in names if name in known and name != "jsonl")]
    missing = [name for name in names if name not in {*known, "console"}]
    why = "metrics go to metrics.jsonl and progress to the terminal in any case"
    if missing:
        lacking = "; ".join(not_offered("tracker", name, known) for name in missing)
        return refuse(f"{lacking}; {why}", near="jsonl", loses=RECORD, values={ITSELF: kept})
    return Fate(kind=SAME, values={ITSELF: names}) if names == kept else mapped({ITSELF: kept}, why)


def tracker_name(*, wandb: str, mlflow: str) -> Decide:
    """Return the translation of a name under which trackers file the run, one option each."""
    options = {"wandb": wandb, "mlflow": mlflow}

    def decide(value: object, settings: Settings) -> Fate:
        chosen = settings.get("trainer.logger")
        names = chosen if isinstance(chosen, list) else [chosen]
        known = offered("verl_contracts.trackers", "jsonl")
        values = {
            f"trainer.logger_options.{name}.{option}": value
            for name, option in options.items()
            if name in names and name in known
        }
        return mapped(values, "an option of each tracker") if values else keep("no tracker is chosen that takes it")

    return decide


def frequency(value: object, settings: Settings) -> Fate:
    """Translate how often to validate; upstream's asynchronous trainer counts weight syncs."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return Fate(kind=SAME, values={_FREQ: -1}) if value == -1 else mapped({_FREQ: -1}, "never is -1")
    every = settings.number("async_training.trigger_parameter_sync_step", 4) if settings.mode == "fully_async" else 1
    if every == 1:
        return Fate(kind=SAME, values={_FREQ: value})
    return mapped({_FREQ: value * every}, f"{value} syncs of {every} steps each")


def steps(value: object, settings: Settings) -> Fate:
    """Translate the number of steps, which total_rollout_steps overrules."""
    if settings.mode == "fully_async" and settings.get("rollout.total_rollout_steps") is not None:
        return keep("no effect while rollout.total_rollout_steps is set")
    return Fate(kind=SAME, values={ITSELF: value})


def rollout_steps(value: object, settings: Settings) -> Fate:
    """Translate prompts in all into steps."""
    if settings.mode != "fully_async" or not isinstance(value, int):
        return keep("not set")
    groups = max(1, step_groups(settings))
    return mapped({"trainer.total_training_steps": max(1, value // groups)}, f"{value} prompts / {groups} in a step")


def device(value: object, settings: Settings) -> Fate:
    """Translate the kind of device."""
    if value in ("cuda", "cpu"):
        return Fate(kind=SAME, values={ITSELF: value})
    return refuse(f"{value} is not known", near="auto", loses=COST)


TRAINER = (
    *under(
        "trainer",
        (
            computed("total_training_steps", steps, ITSELF, why="optimizer steps"),
            same("total_epochs", default=30),
            computed("n_gpus_per_node", devices, ITSELF, why="one number for all nodes", default=8),
            computed("nnodes", nodes, "trainer.n_gpus_per_node", why="one number for all nodes"),
            computed("device", device, ITSELF, why="cuda or cpu"),
            computed("test_freq", frequency, ITSELF, why="steps; -1 for only first and last"),
            same("val_before_train"),
            computed("logger", logger, ITSELF, why="names of trackers"),
            fixed("val_only", "a run trains", near="verl-train check"),
            computed(
                "project_name",
                tracker_name(wandb="project", mlflow="experiment"),
                "trainer.logger_options.wandb.project",
                "trainer.logger_options.mlflow.experiment",
                why="an option of each tracker",
            ),
            computed(
                "experiment_name",
                tracker_name(wandb="name", mlflow="name"),
                "trainer.logger_options.wandb.name",
                "trainer.logger_options.mlflow.name",
                why="an option of each tracker",
            ),
            fixed("default_local_dir", "everything lies in the run folder", near=_OUT, loses=RECORD),
            fixed("default_hdfs_dir", "everything lies in the run folder", near=_OUT, loses=RECORD),
            fixed("rollout_data_dir", "samples are in samples.jsonl of the run folder", any_value=True),
            fixed("validation_data_dir", "samples are in samples.jsonl of the run folder", any_value=True),
            fixed("log_val_generations", "samples are in samples.jsonl of the run folder", any_value=True),
            fixed("save_freq", "the model is saved at the end", ok=(-1, 0), loses=RECORD),
            fixed("resume_mode", "each run begins anew", ok=("disable",), when=SAVED, loses=RECORD),
            fixed("resume_from_path", "each run begins anew", near="actor_rollout_ref.model.path, for weights alone"),
            fixed("max_actor_ckpt_to_keep", "the model is saved at the end", when=SAVED, loses=RECORD),
            fixed("max_critic_ckpt_to_keep", "there is no critic", when=SAVED, loses=RECORD),
            fixed("remove_previous_ckpt_in_save", "the model is saved at the end", when=SAVED, loses=RECORD),
            fixed("del_local_ckpt_after_load", "nothing is loaded but the model", loses=RECORD),
            fixed("checkpoint_callback_class", "the model is saved at the end", loses=RECORD),
            fixed("esi_redundant_time", "the model is saved at the end", ok=(0,), loses=RECORD),
            fixed("critic_warmup", "there is no critic", ok=(0,), when=When("algorithm.adv_estimator", ("gae",))),
            fixed("balance_batch", "ranks get equal numbers of rows, in order of length or not", any_value=True),
            fixed(
                "ray_wait_register_center_timeout",
                "trainer.start_limit_s holds",
                ok=(300,),
                near="trainer.start_limit_s",
            ),
            fixed("use_legacy_worker_impl", "there is one implementation", any_value=True),
            fixed("profile_steps", "nothing is profiled", loses=RECORD),
            fixed("use_v1", "there is one loop", any_value=True),
        ),
    ),
    computed("rollout.test_freq", frequency, "trainer.test_freq", why="the older place"),
    computed(
        "rollout.total_rollout_steps", rollout_steps, "trainer.total_training_steps", why="prompts / groups in a step"
    ),
)
