"""What a Hugging Face checkpoint of a model holds, without loading one, and whether a manifest fits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_contracts.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from verl_contracts.weights import Manifest

__all__ = ["check_manifest", "empty_model", "named_tensors", "some"]

_LISTED = 8
"""Most names listed in a message."""


def empty_model(path: str) -> torch.nn.Module:
    """Return the model of a Hugging Face folder with no memory behind its parameters. Raises `ConfigError`."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model_path {path!r} is not a folder with a model config: {exc}") from exc
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
    return model


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors that may arrive, each under every name that it has."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**model.state_dict(keep_vars=True), **parameters}


def check_manifest(manifest: Manifest, model: torch.nn.Module) -> None:
    """Raise `WeightSyncError` listing every name of `manifest` that does not fit, and every one that it lacks."""
    known = named_tensors(model)
    problems = [f"the model has no {meta.name}" for meta in manifest.tensors if meta.name not in known]
    fitting = [meta for meta in manifest.tensors if meta.name in known]
    problems += [
        f"{meta.name} has shape {meta.shape}, and {tuple(known[meta.name].shape)} in the model"
        for meta in fitting
        if meta.shape != tuple(known[meta.name].shape)
    ]
    problems += [
        f"{meta.name} has dtype {meta.dtype}, and {str(known[meta.name].dtype).removeprefix('torch.')} in the model"
        for meta in fitting
        if _kind(getattr(torch, meta.dtype, None)) not in (None, _kind(known[meta.name].dtype))
    ]
    filled = {id(known[meta.name]) for meta in fitting}
    problems += [f"{name} is not sent" for name, parameter in model.named_parameters() if id(parameter) not in filled]
    if problems:
        raise WeightSyncError("prepare", f"{len(problems)} tensors do not fit: {some(problems)}")


def _kind(dtype: object) -> str | None:
    """Return what numbers of a type are; None for a type that this torch lacks."""
    if not isinstance(dtype, torch.dtype):
        return None
    return "floating" if dtype.is_floating_point else "whole"


def some(names: Iterable[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + rest
