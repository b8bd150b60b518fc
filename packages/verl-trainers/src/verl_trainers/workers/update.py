"""What each optimizer step of a training step trains on, decided from the host before anything is computed.

Owns denominators and the choice of rows. A row whose advantages are all 0 has no policy gradient; when nothing else
needs it, it is not computed, and still counts in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_contracts.errors import DataError
from verl_trainers.losses.aggregate import Counts, count
from verl_trainers.workers.batch import plan_micro_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from verl_contracts.training import TrainSample
    from verl_trainers.config.schema import ActorConfig
    from verl_trainers.workers.batch import MicroBatch, RowBatch

__all__ = ["Cut", "Update", "cut", "plan_updates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step, as one rank sees it."""

    counts: Counts
    """Denominators over all ranks and rows, those that are not computed included."""
    computed_tokens: float
    """Trained tokens that are computed, over all ranks; numbers to log are averaged over them."""
    pure_tokens: float
    """Those whose sampled log-probs may be compared."""
    current_tokens: float
    """Those of them that the present version sampled."""
    zero_rows: int
    """Rows with trained tokens and no advantage."""
    groups: int
    zero_groups: int
    """Groups of which no row has an advantage."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's."""
    reference_micro_batches: tuple[MicroBatch, ...]
    """The same rows, cut for the reference policy."""


def plan_updates(
    samples: Sequence[TrainSample],
    rows: RowBatch,
    advantages: torch.Tensor,
    *,
    actor: ActorConfig,
    reference_budget: int | None,
    rank: int,
    ranks: int,
) -> tuple[Update, ...]:
    """Return the optimizer steps of one pass over the batch: `ppo_mini_batch_size` groups each, in order."""
    uids = list(dict.fromkeys(sample.row.uid for sample in samples))
    number = {uid: index for index, uid in enumerate(uids)}
    group = np.array([number[sample.row.uid] for sample in samples])[rows.sample]
    size = actor.ppo_mini_batch_size or len(uids)
    trainable = rows.trained.any(axis=1)
    zero = trainable & ~((advantages != 0.0).cpu().numpy() & rows.trained).any(axis=1)
    needed = trainable if actor.entropy_coeff != 0.0 or actor.use_kl_loss else trainable & ~zero
    updates: list[Update] = []
    for start in range(0, len(uids), size):
        chosen = (group >= start) & (group < start + size)
        if not (chosen & trainable).any():
            raise DataError(f"groups {uids[start : start + size]} have no token to train on")
        active = np.flatnonzero(chosen & needed)
        mask = rows.mask[active]
        groups = min(size, len(uids) - start)
        budget = actor.ppo_max_token_len_per_gpu
        plan = plan_micro_batches(active, rows.lengths, budget=budget, ranks=ranks)
        reference = plan_micro_batches(active, rows.lengths, budget=reference_budget or budget, ranks=ranks)
        updates.append(
            Update(
                counts=count(rows.mask[np.flatnonzero(chosen)]),
                computed_tokens=float(mask.sum()),
                pure_tokens=float((mask * rows.pure[active]).sum()),
                current_tokens=float((mask * rows.current[active]).sum()),
                zero_rows=int((chosen & zero).sum()),
                groups=groups,
                zero_groups=groups - len(np.unique(group[chosen & trainable & ~zero])),
                micro_batches=plan[rank],
                reference_micro_batches=reference[rank],
            )
        )
    return tuple(updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The tensors of one micro-batch: b rows, t positions."""

    ids: torch.Tensor
    """[b, t] int64, on the host."""
    chosen: torch.Tensor
    """[N] int64, on the host: flat positions whose log-probs are wanted; at least one."""
    mask: torch.Tensor
    """[b, t] float32, 1 at `chosen`; all 0 for a filler."""
    rows: npt.NDArray[np.int64]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return this part of `values` [B, T], on the device of `mask`."""
        return values[self.rows, : self.mask.shape[1]].to(self.mask.device, non_blocking=True)

    def spread(self, flat: torch.Tensor) -> torch.Tensor:
        """Return [b, t] with `flat` at `chosen` and 0 elsewhere."""
        blank = torch.zeros(self.mask.numel(), dtype=flat.dtype, device=flat.device)
        return blank.index_copy(0, self.chosen.to(flat.device, non_blocking=True), flat).view_as(self.mask)


def cut(rows: RowBatch, micro: MicroBatch, wanted: npt.NDArray[np.bool_], *, device: torch.device) -> Cut:
    """Return the tensors of `micro`. `wanted` [B, T] says whose log-probs to compute; never column 0."""
    width = int(rows.lengths[micro.rows].max())
    here = wanted[micro.rows, :width]
    if not micro.live:
        here = np.zeros_like(here)
    chosen = np.flatnonzero(here)
    return Cut(
        ids=rows.ids[micro.rows, :width],
        chosen=torch.from_numpy(chosen if len(chosen) else np.array([1])),
        mask=torch.from_numpy(here.astype(np.float32)).to(device, non_blocking=True),
        rows=micro.rows,
    )
