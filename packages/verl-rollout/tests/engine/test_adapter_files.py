"""What of an adapter is refused before an engine sees it, and with which words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config

from verl_contracts.errors import DataError
from verl_rollout.engine.adapter_files import CONFIG, WEIGHTS, check_files, copy_files
from verl_rollout.engine.torch.checkpoint import empty_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RANK = 4
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).save_pretrained(folder)
    return empty_model(str(folder))


def shapes(layer: str = Q_PROJ, rank: int = RANK, wide: int = 32, tall: int = 32) -> dict[str, tuple[int, ...]]:
    return {f"{layer}.lora_A.weight": (rank, wide), f"{layer}.lora_B.weight": (tall, rank)}


def write(folder: Path, tensors: Mapping[str, tuple[int, ...]], **changes: object) -> Path:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **changes}
    (folder / CONFIG).write_text(json.dumps(config))
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, folder / WEIGHTS)
    return folder


def test_adapter_that_fits_is_taken(tmp_path: Path, model: torch.nn.Module) -> None:
    mlp = shapes("base_model.model.model.layers.0.mlp.down_proj", wide=48)
    folder = write(tmp_path, {**shapes(), **mlp}, use_dora=False, rank_pattern={}, modules_to_save=None, more="unknown")
    check_files(folder, model, max_rank=RANK)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3', not 'LORA'"),
        ({"r": 5}, "its rank r=5 is above max_lora_rank=4"),
        ({"r": None}, "r=None, not a number from 1"),
        ({"lora_alpha": "8"}, "lora_alpha='8'"),
        ({"target_modules": []}, "names no target_modules"),
        ({"bias": "all"}, "bias='all'"),
        ({"use_dora": True}, "sets use_dora, and only plain LoRA is served"),
        ({"alpha_pattern": {"q_proj": 2}, "lora_bias": True}, "sets alpha_pattern.*sets lora_bias"),
        ({"init_lora_weights": "PiSSA_niter_4"}, "init_lora_weights='PiSSA_niter_4', which changed its base model"),
    ],
)
def test_settings_that_would_be_passed_over_are_refused(
    tmp_path: Path, model: torch.nn.Module, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        check_files(write(tmp_path, shapes(), **changes), model, max_rank=RANK)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (shapes(wide=16), r"made for another model or rank: model.layers.0.self_attn.q_proj has \(4, 16\) and"),
        (shapes(tall=64), r"where rank 4 and a weight \(32, 32\) want \(4, 32\) and \(32, 4\)"),
        (shapes(rank=2), "another model or rank"),
        (shapes(Q_PROJ.replace("0", "1")), "this one has no linear layer model.layers.1.self_attn.q_proj"),
        (shapes("base_model.model.model.norm"), "no linear layer model.norm"),
        ({f"{Q_PROJ}.lora_B.weight": (32, 4)}, "q_proj has only lora_B"),
        ({**shapes(), "base_model.model.lm_head.weight": (16, 32)}, "lm_head.weight is no half"),
        ({}, "holds no tensors"),
    ],
)
def test_tensors_of_another_model_are_refused(
    tmp_path: Path, model: torch.nn.Module, tensors: dict[str, tuple[int, ...]], says: str
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        check_files(write(tmp_path, tensors), model, max_rank=RANK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, model: torch.nn.Module, name: str) -> None:
    write(tmp_path, shapes())
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=name):
        check_files(tmp_path, model, max_rank=RANK)


def test_copy_is_told_apart_by_what_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder, shapes())
    first, again = (copy_files(str(folder), tmp_path / name) for name in ("first", "again"))
    write(folder, shapes(), lora_alpha=9)
    assert first == again != copy_files(str(folder), tmp_path / "other")
    assert json.loads((tmp_path / "first" / CONFIG).read_text())["lora_alpha"] == 8


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_copy_of_what_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder, shapes())
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"an adapter is .* and one cannot be read: .*{name}"):
        copy_files(str(folder), tmp_path / "copy")
