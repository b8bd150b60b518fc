"""Writing a policy as a Hugging Face folder that is complete or absent.

Everything is written beside the target and renamed at the end. A folder of that name is replaced only then.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from verl_contracts.weights import WeightSource

__all__ = ["save_policy"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def save_policy(model: PreTrainedModel, source: WeightSource, *, path: str, origin: str, write: bool) -> None:
    """Gather the weights of `source`, and write them with the configuration of `model`.

    Args:
        model: Names its architecture; its own parameters, which may be sharded, are not read.
        source: Every rank iterates it.
        path: Folder to make.
        origin: Folder that the policy came from; its tokenizer and other small files are copied.
        write: Whether this rank writes; the others only gather.
    """
    state: dict[str, torch.Tensor] = {}
    for meta, tensor in source.tensors():
        if write:
            state[meta.name] = tensor.cpu().clone()
    if not write:
        return
    target = Path(path).absolute()
    building = target.with_name(f".{target.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        for file in sorted(Path(origin).iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copy2(file, building / file.name)
        model.save_pretrained(building, state_dict=state)
        _replace(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _replace(building: Path, target: Path) -> None:
    """Put `building` in the place of `target`."""
    if target.exists():
        old = target.with_name(f".{target.name}.old-{os.getpid()}")
        target.rename(old)
        building.rename(target)
        shutil.rmtree(old)
    else:
        building.rename(target)
