"""Log-probs of chosen tokens under a model, computing logits at these positions only.

Prompts are most of many rows, and the head is the widest matrix of a small model; so hidden states are selected in
front of it. That is done by a hook on the head, and not by calling the model's parts, because sharded parameters exist
only while the whole model's own `forward` runs, and because models do things of their own to logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_trainers.workers.token_logprobs import token_log_probs

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["LanguageModel"]


class LanguageModel:
    """A causal language model of transformers, as a function from tokens to log-probs. One thread at a time."""

    def __init__(self, module: PreTrainedModel, *, temperature: float, device: torch.device) -> None:
        if temperature <= 0.0:
            raise ConfigError(
                f"rollout.temperature must be > 0 for training, got {temperature}: "
                "greedy samples have no policy gradient"
            )
        self.module = module
        self._temperature = temperature
        self._device = device
        self._selected: torch.Tensor | None = None
        head: nn.Module = module.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.register_forward_pre_hook(self._select)

    def __call__(self, ids: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [N] float32 twice: log-probs of the tokens at `chosen`, given those before, and the entropy there.

        Args:
            ids: [B, T] int64, padded on the right.
            chosen: [N] int64, flat positions ``row * T + column`` with column ≥ 1; at least one.
        """
        # The last column predicts nothing that is asked for, so it is left out: position (row, column) of `ids` is
        # predicted at (row, column - 1), which is flat position `chosen - row - 1` of what remains.
        inputs = ids[:, :-1].to(self._device, non_blocking=True)
        self._selected = (chosen - chosen // ids.shape[1] - 1).to(self._device, non_blocking=True)
        try:
            logits: torch.Tensor = self.module(input_ids=inputs, use_cache=False).logits
        finally:
            self._selected = None
        tokens = ids.flatten()[chosen].to(self._device, non_blocking=True)
        return token_log_probs(logits[0], tokens, temperature=self._temperature)

    def _select(self, _module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._selected is None:
            return None
        return (inputs[0].flatten(0, 1).index_select(0, self._selected).unsqueeze(0),)
