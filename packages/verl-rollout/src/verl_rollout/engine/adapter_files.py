"""A LoRA adapter in PEFT's format: its two files, and whether they are made for a model.

Whatever would be computed otherwise than its trainer did is refused. The failure that this prevents is an adapter that
loads and is wrong: engines copy what fits of a smaller one, and pass over settings that they do not know.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from verl_contracts.errors import DataError
from verl_rollout.engine.torch.checkpoint import named_tensors, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

__all__ = ["CONFIG", "WEIGHTS", "check_files", "copy_files"]

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_NAME: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_BEYOND: Final = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Settings of PEFT that make an adapter more than one low-rank product, of one scale, on each of some layers."""
_INITS_IN_BASE: Final = ("corda", "loftq", "olora", "pissa")
"""Ways to begin that change the weights of the base model, so that the adapter fits these changed ones only."""


def copy_files(folder: str, into: Path) -> str:
    """Copy an adapter, and return a digest of it. Raises `DataError` when it is not there."""
    into.mkdir()
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        try:
            shutil.copyfile(Path(folder) / name, into / name)
        except OSError as exc:
            raise DataError(f"an adapter is {CONFIG} and {WEIGHTS}, and one cannot be read: {exc}") from exc
        with (into / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_files(folder: Path, model: torch.nn.Module, *, max_rank: int) -> None:
    """Raise `DataError` unless these files are a plain LoRA adapter of `model` with a rank of at most `max_rank`."""
    config = _config(folder / CONFIG)
    problems = list(_of_config(config, max_rank))
    if not problems:
        problems = list(_of_weights(_shapes(folder / WEIGHTS), model, rank=int(str(config["r"]))))
    if problems:
        raise DataError(some(problems))


def _config(path: Path) -> Mapping[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise DataError(f"{path.name} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise DataError(f"{path.name} is not a JSON object")
    return config


def _of_config(config: Mapping[str, object], max_rank: int) -> Iterator[str]:
    """Yield what is wrong with its settings."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        yield f"{CONFIG} has peft_type {config.get('peft_type')!r}, not 'LORA'"
    if not isinstance(rank, int) or rank < 1:
        yield f"{CONFIG} has rank r={rank!r}, not a number from 1"
    elif rank > max_rank:
        yield f"its rank r={rank} is above max_lora_rank={max_rank}"
    if not isinstance(alpha, int | float) or alpha <= 0:
        yield f"{CONFIG} has lora_alpha={alpha!r}, not a number above 0"
    if not config.get("target_modules"):
        yield f"{CONFIG} names no target_modules"
    if config.get("bias", "none") != "none":
        yield f"{CONFIG} has bias={config['bias']!r}, and only 'none' is served"
    yield from (f"{CONFIG} sets {name}, and only plain LoRA is served" for name in _BEYOND if config.get(name))
    if str(config.get("init_lora_weights")).lower().startswith(_INITS_IN_BASE):
        yield f"{CONFIG} has init_lora_weights={config['init_lora_weights']!r}, which changed its base model"


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name → shape."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as exc:
        raise DataError(f"{path.name} cannot be read: {exc}") from exc


def _of_weights(shapes: Mapping[str, tuple[int, ...]], model: torch.nn.Module, *, rank: int) -> Iterator[str]:
    """Yield what of its tensors does not fit."""
    known = named_tensors(model)
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found = _NAME.fullmatch(name)
        if found is None:
            yield f"{name} is no half of a product over a linear layer"
        else:
            pairs.setdefault(found["module"], {})[found["half"]] = shape
    if not shapes:
        yield f"{WEIGHTS} holds no tensors"
    for module, halves in pairs.items():
        weight = known.get(f"{module}.weight")
        if weight is None or weight.dim() != 2:
            yield f"it is made for another model: this one has no linear layer {module}"
        elif set(halves) != {"A", "B"}:
            yield f"{module} has only lora_{min(halves)}"
        elif (halves["A"], halves["B"]) != ((rank, weight.shape[1]), (weight.shape[0], rank)):
            yield (
                f"it is made for another model or rank: {module} has {halves['A']} and {halves['B']} where rank {rank} "
                f"and a weight {tuple(weight.shape)} want {(rank, weight.shape[1])} and {(weight.shape[0], rank)}"
            )
