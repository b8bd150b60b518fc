"""`actor_rollout_ref.model.*`."""

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
    mapped,
    refuse,
    same,
    under,
)
from verl_trainers.convert.tables.data import home

if TYPE_CHECKING:
    from verl_trainers.convert.settings import Settings

__all__ = ["MODEL"]

NO_LORA = "all weights are trained"
LORA = When("actor_rollout_ref.model.lora_rank")


def path(value: object, settings: Settings) -> Fate:
    """Translate the model's folder."""
    text = str(value)
    if "://" in text:
        return refuse(f"{text} lies on another file system", near="a copy on a disk that all nodes see")
    if home(text) != text:
        return mapped({ITSELF: home(text)}, "~ written out, which nothing expands here")
    return Fate(kind=SAME, values={ITSELF: value})


MODEL = under(
    "actor_rollout_ref.model",
    (
        computed("path", path, ITSELF, why="a folder, never a name on a hub"),
        same("trust_remote_code"),
        fixed("tokenizer_path", "the tokenizer lies in the model's folder", near="a copy of it in the model's folder"),
        fixed("hf_config_path", "config.json lies in the model's folder", near="a copy of it in the model's folder"),
        fixed("custom_chat_template", "the template is the tokenizer's", near="chat_template in tokenizer_config.json"),
        fixed("external_lib", "nothing is imported but what a key names", near="a plug-in named by class path"),
        fixed("override_config", "config.json is taken as it is", near="an edited copy of config.json"),
        fixed("override_config.**", "config.json is taken as it is", near="an edited copy of config.json"),
        fixed("use_shm", "weights are read where they lie", loses=COST),
        fixed(
            "enable_gradient_checkpointing",
            "activations are kept",
            near="a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            loses=COST,
        ),
        fixed("enable_activation_offload", "activations stay on their device", loses=COST),
        fixed("use_remove_padding", "rows of a micro-batch are padded to the longest of them", loses=COST),
        fixed("use_liger", "kernels are PyTorch's", loses=COST),
        fixed("use_fused_kernels", "kernels are PyTorch's", loses=COST),
        fixed("fused_kernel_options.**", "kernels are PyTorch's", ok=("torch",), loses=COST),
        fixed(
            "tiled_mlp.**", "kernels are PyTorch's", when=When("actor_rollout_ref.model.tiled_mlp.enabled"), loses=COST
        ),
        fixed("lora_rank", NO_LORA, ok=(0,)),
        fixed("lora_alpha", NO_LORA, when=LORA),
        fixed("target_modules", NO_LORA, when=LORA),
        fixed("exclude_modules", NO_LORA, when=LORA),
        fixed("lora_adapter_path", NO_LORA, near="a folder with the adapter merged into the weights"),
        fixed("lora.rank", NO_LORA, ok=(0,)),
        fixed("lora.**", NO_LORA, when=When("actor_rollout_ref.model.lora.rank")),
        fixed("mtp.**", "no layer predicts more than one token", when=When("actor_rollout_ref.model.mtp.enable")),
        fixed("use_trainer_tokenizer", "there is one tokenizer", any_value=True),
        fixed("load_tokenizer", "the tokenizer is always loaded", any_value=True, loses=RECORD),
    ),
)
