"""One rank's policy: what a training step computes, and in which order.

Owns the step from samples to new weights: advantages, old and reference log-probs, the updates, and their numbers. It
knows no algorithm (those are plug-ins), no process and no network beyond its collectives. Every rank is given the whole
batch and makes the same plan for all ranks, so denominators need no communication and ranks never wait for one that has
a different number of micro-batches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from verl_contracts.errors import StateError
from verl_contracts.tracking import Metric
from verl_contracts.training import PolicyLossInputs, StepResult
from verl_trainers.losses.aggregate import aggregate, masked_sum
from verl_trainers.losses.kl import kl_estimate
from verl_trainers.workers.algorithm import build_estimator, build_policy_loss
from verl_trainers.workers.batch import build_rows, estimate_advantages, plan_micro_batches
from verl_trainers.workers.forward import LanguageModel
from verl_trainers.workers.model import DTYPES, load_model, narrow_parameters, reshard_model, shard_model
from verl_trainers.workers.optimizer import PolicyOptimizer
from verl_trainers.workers.saving import save_policy
from verl_trainers.workers.schedule import learning_rate
from verl_trainers.workers.source import PolicyWeights, canonical_tensors
from verl_trainers.workers.timing import Stopwatch
from verl_trainers.workers.update import cut, plan_updates

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from verl_contracts.training import StepContext, TrainEngine, TrainSample
    from verl_trainers.workers.batch import MicroBatch, RowBatch
    from verl_trainers.workers.settings import EngineSettings
    from verl_trainers.workers.update import Update

__all__ = ["FsdpEngine"]

_log = logging.getLogger(__name__)

_GAP = "rollout/logprob_diff"
_CURRENT_GAP = "rollout/logprob_diff_same_version"
_LARGEST_GAP = "rollout/logprob_diff_max"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepInputs:
    """What all updates of a step share. All [B, T] on the host."""

    rows: RowBatch
    advantages: torch.Tensor
    old: torch.Tensor | None
    """None when the ratio is taken against the very policy that is trained: one update, recomputed log-probs."""
    reference: torch.Tensor | None


class FsdpEngine:
    """A causal language model of transformers: plain at one rank, sharded by FSDP2 over several.

    With several ranks `torch.distributed` must be initialized before it is built.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._device = torch.device(settings.device)
        self._dtype = DTYPES[settings.actor.fsdp_config.model_dtype]
        self._estimator = build_estimator(settings.algorithm)
        self._loss = build_policy_loss(settings.actor)
        self._policy = self._load()
        self._optimizer = PolicyOptimizer(
            self._policy.module,
            settings.actor.optim,
            grad_clip=settings.actor.grad_clip,
            compute_dtype=self._dtype,
            sharded=settings.world_size > 1,
        )
        self._tensors = canonical_tensors(self._policy.module, self._optimizer.master_of)
        self._reference: LanguageModel | None = None
        if settings.actor.use_kl_loss:
            self._reference = self._load()
            self._reference.module.requires_grad_(False)
            if settings.world_size == 1:
                narrow_parameters(self._reference.module, self._dtype)

    def log_probs(self, samples: Sequence[TrainSample], /) -> Sequence[torch.Tensor]:
        """Return per trajectory [T] float32 log-probs under the present policy; position 0 is 0."""
        rows = build_rows(samples, version=-1, temperature=self._settings.temperature)
        real = np.arange(rows.ids.shape[1]) < rows.lengths[:, None]
        real[:, 0] = False
        budget = self._settings.actor.ppo_max_token_len_per_gpu
        (plan,) = plan_micro_batches(np.arange(len(rows.lengths)), rows.lengths, budget=budget)
        dense = self._fixed_log_probs(self._policy, rows, plan, wanted=real)
        return [row[:length] for row, length in zip(dense, rows.lengths.tolist(), strict=True)]

    def update(self, batch: Sequence[TrainSample], context: StepContext, /) -> StepResult:
        """Do one step. Rows are put in order of group and sample first, so their order of arrival changes no bit."""
        settings, actor = self._settings, self._settings.actor
        if context.total_steps != settings.total_steps:
            raise StateError(
                f"the step belongs to a run of {context.total_steps} steps, and the learning rate was planned for "
                f"{settings.total_steps}"
            )
        self._optimizer.clear()  # a step that raised may have left gradients behind
        watch = Stopwatch()
        with watch.part("prepare"):
            samples = sorted(batch, key=lambda sample: (sample.row.uid, sample.row.sample))
            rows = build_rows(samples, version=context.step - 1, temperature=settings.temperature)
            advantages = estimate_advantages(self._estimator, samples, rows)
            updates = plan_updates(
                samples,
                rows,
                advantages,
                actor=actor,
                reference_budget=settings.ref.log_prob_max_token_len_per_gpu,
                rank=settings.rank,
                ranks=settings.world_size,
            )
        with watch.part("old_log_probs"):
            old = self._old_log_probs(rows, updates)
        with watch.part("reference_log_probs"):
            reference = self._reference_log_probs(rows, updates)
        inputs = _StepInputs(rows=rows, advantages=advantages, old=old, reference=reference)
        rate = learning_rate(actor.optim, context.step, settings.total_steps)
        applied = 0
        metrics: list[Metric] = []
        for number, update in enumerate(updates * actor.ppo_epochs):
            with watch.part("forward_backward"):
                shares = [self._backward(micro, update, inputs) for micro in update.micro_batches]
            with watch.part("reduce"):
                sums = self._reduced(shares)
            with watch.part("optimizer"):
                outcome = self._optimizer.step(rate, loss=sums["loss"])
            applied += outcome.applied
            metrics.append(Metric(name="actor/grad_norm", value=outcome.grad_norm))
            metrics += _update_metrics(sums, update, first=number == 0)
            if not outcome.applied:
                _log.warning(
                    "step %d: loss %s, gradient norm %s; update skipped", context.step, sums["loss"], outcome.grad_norm
                )
        asked = len(updates) * actor.ppo_epochs
        metrics += [
            Metric(name="actor/lr", value=rate, reduce="last"),
            Metric(name="actor/skipped_updates", value=asked - applied, reduce="sum"),
            Metric(name="actor/zero_advantage_rows", value=sum(u.zero_rows for u in updates), reduce="sum"),
            Metric(
                name="advantage/zero_groups", value=sum(u.zero_groups for u in updates) / sum(u.groups for u in updates)
            ),
        ]
        return StepResult(
            version=context.step, rows=len(samples), updates=applied, metrics=tuple(metrics), seconds=watch.seconds
        )

    def perturb(self, scale: float, /) -> None:
        """Change each weight by up to `scale` of itself, so that it can be seen whether others follow."""
        self._optimizer.perturb(scale)

    def weights(self) -> PolicyWeights:
        """Return the present weights; it stays valid, and shows later ones later."""
        return PolicyWeights(self._tensors, dtype=DTYPES[self._settings.wire_dtype])

    def save(self, path: str, /) -> None:
        """Write a Hugging Face folder in the type of the forward pass, complete or not at all."""
        save_policy(
            self._policy.module,
            PolicyWeights(self._tensors, dtype=self._dtype),
            path=path,
            origin=self._settings.model.path,
            write=self._settings.rank == 0,
        )

    def _load(self) -> LanguageModel:
        settings = self._settings
        model = load_model(settings.model.path, trust_remote_code=settings.model.trust_remote_code, device=self._device)
        language_model = LanguageModel(model, temperature=settings.temperature, device=self._device)
        if settings.world_size > 1:
            shard_model(model, world_size=settings.world_size, dtype=self._dtype, device=self._device)
        return language_model

    def _old_log_probs(self, rows: RowBatch, updates: Sequence[Update]) -> torch.Tensor | None:
        actor = self._settings.actor
        if actor.old_log_prob == "rollout":
            return rows.sampled_logprobs
        if len(updates) * actor.ppo_epochs == 1:
            return None
        plan = [micro for update in updates for micro in update.micro_batches]
        return self._fixed_log_probs(self._policy, rows, plan, wanted=rows.trained)

    def _reference_log_probs(self, rows: RowBatch, updates: Sequence[Update]) -> torch.Tensor | None:
        if self._reference is None:
            return None
        plan = [micro for update in updates for micro in update.reference_micro_batches]
        return self._fixed_log_probs(self._reference, rows, plan, wanted=rows.trained)

    @torch.no_grad()
    def _fixed_log_probs(
        self, model: LanguageModel, rows: RowBatch, plan: Iterable[MicroBatch], *, wanted: npt.NDArray[np.bool_]
    ) -> torch.Tensor:
        """Return [B, T] on the host, 0 where nothing was wanted or the row is another rank's."""
        out = torch.zeros(rows.mask.shape)
        for micro in plan:
            part = cut(rows, micro, wanted, device=self._device)
            log_probs, _ = model(part.ids, part.chosen)
            values = part.spread(log_probs)
            if micro.live:
                out[micro.rows, : values.shape[1]] = values.cpu()
        reshard_model(model.module)
        return out

    def _backward(self, micro: MicroBatch, update: Update, inputs: _StepInputs) -> dict[str, torch.Tensor]:
        """Add one micro-batch to the gradients. Returns its shares of what is logged: sums, and one maximum."""
        actor, mode, counts = self._settings.actor, self._loss.aggregation, update.counts
        part = cut(inputs.rows, micro, inputs.rows.trained, device=self._device)
        flat, flat_entropy = self._policy(part.ids, part.chosen)
        logprobs, bits = part.spread(flat), part.spread(flat_entropy)
        old = logprobs.detach() if inputs.old is None else part.take(inputs.old)
        output = self._loss.losses(
            PolicyLossInputs(
                logprobs=logprobs, old_logprobs=old, advantages=part.take(inputs.advantages), mask=part.mask
            )
        )
        policy_loss = aggregate(output.losses, part.mask, mode, counts)
        loss = policy_loss
        sums = {"pg_loss": policy_loss.detach(), "entropy": masked_sum(bits.detach(), part.mask)}
        if actor.entropy_coeff != 0.0:
            loss = loss - actor.entropy_coeff * aggregate(bits, part.mask, mode, counts)
        if inputs.reference is not None:
            divergence = kl_estimate(logprobs, part.take(inputs.reference), actor.kl_loss_type)
            loss = loss + actor.kl_loss_coef * aggregate(divergence, part.mask, mode, counts)
            sums["kl_loss"] = masked_sum(divergence.detach(), part.mask)
        # FSDP2 averages over ranks, while the shares of a loss with global denominators are to be added.
        (loss * self._settings.world_size).backward()  # type: ignore[no-untyped-call]
        self._optimizer.accumulate()
        with torch.no_grad():
            sums["loss"] = loss.detach()
            for name, values in output.metrics.items():
                sums[name] = masked_sum(values, part.mask)
            gap = (logprobs - part.take(inputs.rows.sampled_logprobs)).abs() * part.mask
            sums[_GAP] = (gap * part.take(inputs.rows.pure)).sum()
            sums[_CURRENT_GAP] = (gap * part.take(inputs.rows.current)).sum()
            sums[_LARGEST_GAP] = (gap * part.take(inputs.rows.pure)).max()
        return sums

    def _reduced(self, shares: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Combine the shares of all micro-batches and ranks: one transfer to the host for all of them."""
        names = [name for name in shares[0] if name != _LARGEST_GAP]
        total = torch.stack([torch.stack([share[name].double() for name in names]) for share in shares]).sum(dim=0)
        largest = torch.stack([share[_LARGEST_GAP].double() for share in shares]).max()
        if self._settings.world_size > 1:
            dist.all_reduce(total)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        values = torch.cat([total, largest.reshape(1)]).tolist()
        return dict(zip([*names, _LARGEST_GAP], values, strict=True))


def _update_metrics(sums: Mapping[str, float], update: Update, *, first: bool) -> list[Metric]:
    """Turn the sums of one update into metrics. Gaps are meaningful before the first update only."""
    metrics: list[Metric] = []
    for name, value in sums.items():
        if name in ("loss", "pg_loss"):
            metrics.append(Metric(name=f"actor/{name}", value=value))
        elif name in (_GAP, _CURRENT_GAP):
            tokens = update.pure_tokens if name == _GAP else update.current_tokens
            if first and tokens > 0:
                metrics.append(Metric(name=name, value=value / tokens))
        elif name == _LARGEST_GAP:
            if first and update.pure_tokens > 0:
                metrics.append(Metric(name=name, value=value, reduce="max"))
        elif update.computed_tokens > 0:
            metrics.append(Metric(name=f"actor/{name}", value=value / update.computed_tokens))
    return metrics


if TYPE_CHECKING:

    def _is_train_engine(x: FsdpEngine) -> TrainEngine:
        return x
