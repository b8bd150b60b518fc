"""What a model folder says about the model, without its weights being read.

Owns the refusal of folders that would fail long after the start: weights that are cut off, a type that transformers
does not know, files that hold no JSON. Sizes come from the model itself, built on torch's meta device.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.errors import DataError
from verl_trainers.data.tokenizer import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ModelFacts", "read_model", "weight_problems"]

_KEY = "actor_rollout_ref.model.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a causal language model."""

    model_type: str
    num_parameters: int
    """A tensor that is used twice counts once."""
    largest_tensor: int
    """Elements."""
    largest_block: int
    """Parameters of the largest transformer block."""
    outside_blocks: int
    """Parameters outside of all blocks: embedding, head, last norm."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    """Most tokens of a sequence; None when the model does not say."""

    @property
    def kv_elements(self) -> int:
        """Numbers that the KV cache keeps for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_model(path: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Return the sizes of the model in `path`. Raises `DataError` when it is none that could be trained."""
    raw = read_json(Path(path) / "config.json")
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        read_json(generation)
    with _quiet():
        config, model = _build(path, str(raw.get("model_type")), trust_remote_code)
        if generation.is_file():
            _read_generation_config(path)
    sizes = [parameter.numel() for parameter in model.parameters()]
    blocks = _blocks(model)
    text: PreTrainedConfig = config.get_text_config()

    def number(name: str, default: int | None = None) -> int:
        value: object = getattr(text, name, None)
        if type(value) is int and value > 0:
            return value
        if default is None:
            raise DataError(f"{_KEY}: config.json in {path} has no usable {name!r}: {value!r}; copy it again")
        return default

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return ModelFacts(
        model_type=str(raw.get("model_type")),
        num_parameters=sum(sizes),
        largest_tensor=max(sizes),
        largest_block=max(blocks, default=0),
        outside_blocks=sum(sizes) - sum(blocks),
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", 4 * hidden),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        vocab_size=number("vocab_size"),
        max_positions=number("max_position_embeddings", 0) or None,
    )


def weight_problems(path: str) -> list[str]:
    """Return what is wrong with the weight files; their contents are not read, only their headers and sizes."""
    from safetensors import SafetensorError, safe_open

    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    problems: list[str] = []
    if index.is_file():
        parts = read_json(index).get("weight_map")
        named = set(map(str, parts.values())) if isinstance(parts, dict) else set()
        missing = sorted(named - {file.name for file in files})
        if missing:
            problems.append(f"{path} lacks {', '.join(missing)}, which {index.name} names; copy it again")
    if not files and not problems and not any(folder.glob("*.bin")):
        problems.append(f"{path} holds no weights (*.safetensors); copy them into it")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as exc:
            problems.append(f"{file} is damaged or cut off: {exc}; copy it again")
    return problems


def _build(path: str, model_type: str, trust_remote_code: bool) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Build config and model on the meta device, where parameters have shapes and no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as exc:  # whatever a config class makes of wrong values
        raise DataError(
            f"{_KEY}: config.json in {path}, model_type {model_type!r}, cannot be used by transformers {__version__}: "
            f"{_first_line(exc)}; install a transformers that knows it, or set "
            "actor_rollout_ref.model.trust_remote_code=true if the folder brings its own code"
        ) from exc
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            return config, build(config, trust_remote_code=trust_remote_code)
    except Exception as exc:
        raise DataError(
            f"{_KEY}: no causal language model can be built from config.json in {path}, model_type {model_type!r}: "
            f"{_first_line(exc)}; name the folder of a model that generates text"
        ) from exc


def _read_generation_config(path: str) -> None:
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as exc:
        raise DataError(
            f"{_KEY}: generation_config.json in {path} cannot be used: {_first_line(exc)}; correct or delete it"
        ) from exc


def _blocks(model: nn.Module) -> list[int]:
    """Return the sizes of the model's transformer blocks."""
    named: object = getattr(model, "_no_split_modules", None)
    names = frozenset(map(str, named)) if isinstance(named, (list, tuple, set, frozenset)) else frozenset()
    return [
        sum(parameter.numel() for parameter in module.parameters())
        for module in model.modules()
        if type(module).__name__ in names
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries from printing what is said here anyway.

    Asked for its level by its own means, transformers sets up its logger first, from TRANSFORMERS_VERBOSITY; a level
    read before that, and put back after it, would leave the logger open to everything.
    """
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)


def _first_line(exc: BaseException) -> str:
    text = str(exc).strip().partition("\n")[0]
    return f"{type(exc).__name__}: {text[:300]}"
