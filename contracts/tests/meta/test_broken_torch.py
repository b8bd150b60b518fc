"""As `test_broken`, for what needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest

pytest.importorskip("torch")

import torch
from broken import Broken, name_of, reject
from references_torch import Centred, Clipped
from subjects_torch import BackendSubject, EstimatorSubject, LossSubject

from verl_contracts.errors import WeightSyncError
from verl_contracts.testing.memory import MemoryBackend, MemoryReceiver, MemorySender
from verl_contracts.training import AdvantageInputs, PolicyLossOutput
from verl_contracts.weights import LoadReport, TensorMeta, TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from verl_contracts.clock import Deadline
    from verl_contracts.training import PolicyLossInputs
    from verl_contracts.weights import (
        EndpointInfo,
        Manifest,
        Plan,
        WeightReceiver,
        WeightSender,
        WeightSource,
        WeightTarget,
    )

EVERY_BIT = "test_every_bit_arrives_for_every_bucket_size"
SMALL = {"bucket_bytes": 4999, "receivers": 1}


class Between:
    """A target between the receiver and the real one, which changes what is loaded."""

    def __init__(self, target: WeightTarget, change: Callable[[TensorMeta, Tensor], Tensor | None]) -> None:
        self.target = target
        self.change = change

    def load(self, items: Iterable[tuple[TensorMeta, Tensor]], /) -> LoadReport:
        return self.target.load(self.changed(items))

    def changed(self, items: Iterable[tuple[TensorMeta, Tensor]]) -> Iterator[tuple[TensorMeta, Tensor]]:
        for meta, tensor in items:
            changed = self.change(meta, tensor)
            if changed is not None:
                yield meta, changed


class EmptyIsDropped(MemoryReceiver):
    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        between = Between(target, lambda meta, tensor: tensor if tensor.numel() else None)
        return super().receive(plan, between, deadline=deadline)


def _flip(meta: TensorMeta, tensor: Tensor) -> Tensor:
    if meta.name != "several buckets":
        return tensor
    changed = tensor.clone()
    changed.view(torch.uint8)[5000] ^= 1
    return changed


class OneBitIsFlipped(MemoryReceiver):
    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        return super().receive(plan, Between(target, _flip), deadline=deadline)


class CutIsComplete(MemoryReceiver):
    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        try:
            return super().receive(plan, target, deadline=deadline)
        except WeightSyncError:
            return TransferReport(owner="r0", rank=0, tensors=7, num_bytes=0, seconds=0.0, digests={})


class BlindReceiver(MemoryReceiver):
    def receive(self, plan: Plan, target: WeightTarget, /, *, deadline: Deadline) -> TransferReport:
        report = super().receive(plan, target, deadline=deadline)
        return replace(report, digests=dict.fromkeys(report.digests, 0))


class BlindSender(MemorySender):
    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        report = super().send(plan, source, deadline=deadline)
        return replace(report, digests=dict.fromkeys(report.digests, 0))


class HoldsOn:
    """A source that gives everything out at once, as a sender does that keeps views."""

    def __init__(self, source: WeightSource) -> None:
        self.manifest = source.manifest
        self.source = source

    def tensors(self) -> Iterator[tuple[TensorMeta, Tensor]]:
        yield from list(self.source.tensors())


class KeepsViews(MemorySender):
    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        return super().send(plan, HoldsOn(source), deadline=deadline)


class SwallowsWords(MemorySender):
    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        try:
            return super().send(plan, source, deadline=deadline)
        except WeightSyncError:
            raise WeightSyncError("transfer", "failed") from None


class LeavesAMess(MemorySender):
    failed: ClassVar[bool] = False

    def send(self, plan: Plan, source: WeightSource, /, *, deadline: Deadline) -> TransferReport:
        if LeavesAMess.failed:
            self.abort("the last session is still open")
            raise WeightSyncError("transfer", "the last session is still open")
        try:
            return super().send(plan, source, deadline=deadline)
        except WeightSyncError:
            LeavesAMess.failed = True
            raise


class ClosesOnce(MemorySender):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise WeightSyncError("prepare", "closed twice")
        self.closed = True
        super().close()


class ServesOnce(MemorySender):
    served = False

    def prepare(self, manifest: Manifest, /, *, session: str) -> EndpointInfo:
        if self.served:
            raise WeightSyncError("prepare", "served already")
        self.served = True
        return super().prepare(manifest, session=session)


def _backend(
    name: str, sender: type[WeightSender] = MemorySender, receiver: type[WeightReceiver] = MemoryReceiver
) -> type:
    return type(name, (MemoryBackend,), {"sender_class": sender, "receiver_class": receiver})


BACKEND = [
    Broken(
        kind=_backend("Empty", receiver=EmptyIsDropped), test=EVERY_BIT, says="the empty ones too", parameters=SMALL
    ),
    Broken(kind=_backend("Flipped", receiver=OneBitIsFlipped), test=EVERY_BIT, says="AssertionError", parameters=SMALL),
    Broken(kind=_backend("Views", sender=KeepsViews), test=EVERY_BIT, says="AssertionError", parameters=SMALL),
    Broken(
        kind=_backend("Blind", sender=BlindSender, receiver=BlindReceiver),
        test="test_digest_tells_payloads_apart",
        says="assert 1 == 4",
    ),
    Broken(
        kind=_backend("OneSideBlind", receiver=BlindReceiver), test=EVERY_BIT, says="AssertionError", parameters=SMALL
    ),
    Broken(
        kind=_backend("Cut", receiver=CutIsComplete),
        test="test_cut_stream_is_an_error_on_both_sides",
        says="the receiver reported success",
    ),
    Broken(
        kind=_backend("Words", sender=SwallowsWords),
        test="test_receiver_that_fails_ends_the_sender_with_its_words",
        says="no space left in row 3",
    ),
    Broken(
        kind=_backend("Nobody", sender=SwallowsWords),
        test="test_receiver_that_never_joins_is_named_at_the_deadline",
        says="missing",
    ),
    Broken(
        kind=_backend("Mess", sender=LeavesAMess),
        test="test_receiver_that_fails_ends_the_sender_with_its_words",
        says="still open",
    ),
    Broken(
        kind=_backend("ServesOnce", sender=ServesOnce),
        test="test_same_objects_serve_one_session_after_another",
        says="served already",
    ),
    Broken(
        kind=_backend("Once", sender=ClosesOnce),
        test="test_close_is_legal_in_every_state_and_repeatable",
        says="closed twice",
    ),
]


@pytest.mark.parametrize("row", BACKEND, ids=name_of)
def test_broken_backend_is_rejected(row: Broken) -> None:
    reject(BackendSubject, row)


class OverTheBatch(Centred):
    def estimate(self, inputs: AdvantageInputs, /) -> Tensor:
        centred: Tensor = (inputs.scores - inputs.scores.mean()).unsqueeze(1) * inputs.mask
        return centred


class DividesByNothing(Centred):
    def estimate(self, inputs: AdvantageInputs, /) -> Tensor:
        result = super().estimate(inputs)
        return result / result.std()


class IgnoresTheMask(Centred):
    def estimate(self, inputs: AdvantageInputs, /) -> Tensor:
        return super().estimate(replace(inputs, mask=torch.ones_like(inputs.mask)))


class WritesIntoScores(Centred):
    def estimate(self, inputs: AdvantageInputs, /) -> Tensor:
        inputs.scores.sub_(inputs.scores.mean())
        return super().estimate(inputs)


class ByPosition(Centred):
    def estimate(self, inputs: AdvantageInputs, /) -> Tensor:
        return super().estimate(replace(inputs, groups=torch.arange(len(inputs.scores)) // 3))


ESTIMATOR = [
    Broken(kind=OverTheBatch, test="test_groups_do_not_see_each_other", says="AssertionError"),
    Broken(
        kind=DividesByNothing,
        test="test_equal_scores_say_nothing",
        says="AssertionError",
        parameters={"score": 1.0, "size": 2},
    ),
    Broken(kind=IgnoresTheMask, test="test_shape_type_and_mask_are_right", says="AssertionError"),
    Broken(kind=WritesIntoScores, test="test_inputs_are_not_changed", says="scores"),
    Broken(kind=ByPosition, test="test_order_of_rows_does_not_matter", says="AssertionError"),
]


@pytest.mark.parametrize("row", ESTIMATOR, ids=name_of)
def test_broken_estimator_is_rejected(row: Broken) -> None:
    reject(EstimatorSubject, row)


class Uphill(Clipped):
    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        output = super().losses(inputs)
        return replace(output, losses=-output.losses)


class AlreadySummed(Clipped):
    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        output = super().losses(inputs)
        return replace(output, losses=output.losses.sum())


class NormalisesOverTheBatch(Clipped):
    def losses(self, inputs: PolicyLossInputs, /) -> PolicyLossOutput:
        output = super().losses(inputs)
        return replace(output, losses=output.losses / output.losses.detach().abs().mean())


LOSS = [
    Broken(kind=Uphill, test="test_gradient_at_ratio_one_is_that_of_the_policy_gradient", says="AssertionError"),
    Broken(kind=AlreadySummed, test="test_losses_are_finite_and_by_token", says="AssertionError"),
    Broken(kind=NormalisesOverTheBatch, test="test_tokens_do_not_see_each_other", says="AssertionError"),
]


@pytest.mark.parametrize("row", LOSS, ids=name_of)
def test_broken_loss_is_rejected(row: Broken) -> None:
    reject(LossSubject, row)
