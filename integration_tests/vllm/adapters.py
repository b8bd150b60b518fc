"""LoRA adapters written by hand in PEFT's format, and the models that they make."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

ALPHA = 6


def write_adapter(folder: Path, model: PreTrainedModel, *, seed: int, rank: int = 8, only: str = "_proj") -> Path:
    """Write an adapter over those linear layers of `model` whose names contain `only`."""
    generator = torch.Generator().manual_seed(seed)
    halves: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if only in name and weight.dim() == 2:
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            halves[f"{layer}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            halves[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
    assert halves
    folder.mkdir(parents=True, exist_ok=True)
    save_file(halves, folder / "adapter_model.safetensors")
    layers = sorted({name.split(".")[-3] for name in halves})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": layers, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return `model` with the products of an adapter added to its weights."""
    from safetensors.torch import load_file

    halves = load_file(folder / "adapter_model.safetensors")
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    new = copy.deepcopy(model)
    for name, weight in new.named_parameters():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in halves:
            product = halves[f"{layer}.lora_B.weight"] @ halves[f"{layer}.lora_A.weight"]
            weight.data += product * (ALPHA / rank)
    return new
