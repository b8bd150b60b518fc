"""Parts of an algorithm as somebody else's repository would write them."""

from __future__ import annotations

import torch

from verl_contracts.errors import DataError
from verl_contracts.training import AdvantageInputs


class LateRefusal:
    """An `AdvantageEstimator` that takes the first batch and refuses the second."""

    def __init__(self) -> None:
        self._batches = 0

    def estimate(self, inputs: AdvantageInputs, /) -> torch.Tensor:
        self._batches += 1
        if self._batches > 1:
            raise DataError("the second batch is refused on purpose")
        return inputs.scores.float().unsqueeze(1) * inputs.mask
