"""`data.*`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_trainers.convert.rows import (
    COST,
    ITSELF,
    RECORD,
    Fate,
    computed,
    fixed,
    keep,
    mapped,
    moved,
    refuse,
    same,
    under,
)
from verl_trainers.convert.rows import SAME as SAME_KIND

if TYPE_CHECKING:
    from verl_trainers.convert.settings import Settings

__all__ = ["DATA", "step_groups"]

TEXT_ONLY = "prompts are text; there are no images, videos or sounds"


def files(value: object, settings: Settings) -> Fate:
    """Translate paths: a list, and no shorthand for the home folder or another file system."""
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    remote = [path for path in paths if "://" in path]
    if remote:
        return refuse(f"{remote[0]} lies on another file system", near="a copy on a disk that all nodes see")
    found = [home(path) for path in paths]
    if found != paths:
        return mapped({ITSELF: found}, "~ written out, which nothing expands here")
    return Fate(kind=SAME_KIND, values={ITSELF: found})


def home(path: str) -> str:
    """Return `path` with a leading ``~`` as the loader reads it."""
    return f"${{oc.env:HOME}}{path[1:]}" if path == "~" or path.startswith("~/") else path


def step_groups(settings: Settings) -> int:
    """Return the groups that upstream's asynchronous trainer fetches for one step."""
    mini = settings.number("actor_rollout_ref.actor.ppo_mini_batch_size")
    return mini * settings.number("async_training.require_batches")


def batch(value: object, settings: Settings) -> Fate:
    """Translate the batch: upstream's asynchronous trainer counts in mini-batches and ignores this key."""
    if settings.mode == "fully_async":
        return keep("no effect: a step is async_training.require_batches mini-batches")
    return Fate(kind=SAME_KIND, values={ITSELF: value})


DATA = under(
    "data",
    (
        computed("train_files", files, ITSELF, why="a list of local files"),
        computed("val_files", files, ITSELF, why="a list of local files"),
        same("prompt_key"),
        same("max_prompt_length"),
        same("max_response_length"),
        computed("train_batch_size", batch, ITSELF, why="groups in one step", default=1024),
        same("shuffle"),
        same("seed"),
        same("filter_overlong_prompts"),
        moved("apply_chat_template_kwargs", "data.chat_template_kwargs", why="another name"),
        moved("apply_chat_template_kwargs.**", "data.chat_template_kwargs.**", why="another name"),
        moved(
            "trust_remote_code",
            "actor_rollout_ref.model.trust_remote_code",
            why="one key for the tokenizer and the model",
        ),
        fixed("tokenizer", "the tokenizer lies in the model's folder", near="actor_rollout_ref.model.path"),
        fixed("use_shm", "files are read where they lie", loses=COST),
        fixed("train_max_samples", "all rows are used", ok=(-1,), near="a file with fewer rows"),
        fixed("val_max_samples", "all rows are used", ok=(-1,), near="a file with fewer rows"),
        fixed("reward_fn_key", "the column is data_source", ok=("data_source",)),
        fixed(
            "gen_batch_size",
            "prompts are admitted one by one, as many as the bound on staleness allows",
            any_value=True,
        ),
        fixed("val_batch_size", "replicas batch by themselves", any_value=True),
        fixed("dataloader_num_workers", "rows are read once, at the start", any_value=True),
        fixed("filter_overlong_prompts_workers", "all prompts are tokenized at once, at the start", any_value=True),
        fixed("validation_shuffle", "validation goes in the order of the files", loses=RECORD),
        fixed(
            "truncation",
            "a prompt that is too long is never cut",
            ok=("error",),
            near="data.filter_overlong_prompts=true",
        ),
        fixed("return_raw_chat", "agent loops get the messages in any case", any_value=True),
        fixed("return_raw_input_ids", "there is one chat template", ok=(), near="a template of the reward's own"),
        fixed("return_full_prompt", "rewards get the messages and the answer"),
        fixed("tool_config_path", "there are no tools yet", near="an agent loop of your own: rollout.agent"),
        fixed("function_tool_path", "there are no tools yet", near="an agent loop of your own: rollout.agent"),
        fixed("custom_cls.name", "rows come from files", any_value=True),
        fixed("custom_cls.**", "rows come from JSONL and parquet files", near="prepare: a function that writes them"),
        fixed("datagen.**", "rows come from JSONL and parquet files", near="prepare: a function that writes them"),
        fixed("sampler.**", "the order is that of data.seed", near="data.shuffle"),
        fixed("return_multi_modal_inputs", TEXT_ONLY, any_value=True),
        fixed("image_patch_size", TEXT_ONLY, any_value=True),
        fixed("mm_processor_kwargs", TEXT_ONLY),
        fixed("mm_processor_kwargs.**", TEXT_ONLY),
        fixed("image_key", TEXT_ONLY, ok=("images",)),
        fixed("video_key", TEXT_ONLY, ok=("videos",)),
        fixed("audio_key", TEXT_ONLY, ok=("audios",)),
    ),
)
