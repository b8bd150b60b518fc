"""A baseline at its best: one thing that slows transformers down on a CPU and that is no merit of ours, mended.

Asked for the last position only, a model of transformers gives its output head a strided slice; for bfloat16 on a CPU
torch then copies the head's matrix once for each row of the batch (measured on SmolLM2-135M with 32 rows: 2.9 s of the
3.9 s that the first token takes). Whoever meets that mends it in a line, so no figure here may come from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["MENDED", "mend_head"]

MENDED = "the input of its output head made contiguous, see tools/bench/mended.py"


def mend_head(model: PreTrainedModel) -> None:
    """Give the output head of `model` contiguous inputs."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head")
    head.register_forward_pre_hook(_contiguous)


def _contiguous(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0].contiguous(), *inputs[1:])
