from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from ckpt_transport import (
    CLOCK,
    DictSource,
    DictTarget,
    Transfer,
    check_equal,
    error_of,
    held,
    named,
    new_session,
    sample_weights,
)

from verl_ckpt_engine.planner import SingleHostPlanner
from verl_ckpt_engine.shm import ShmReceiver, ShmSender
from verl_ckpt_engine.shm.frames import END_FRAME, EndRecord, encode_end
from verl_ckpt_engine.shm.geometry import Geometry
from verl_ckpt_engine.shm.ring import Ring
from verl_ckpt_engine.tally import fingerprint
from verl_contracts.clock import Deadline
from verl_contracts.errors import StateError
from verl_contracts.weights import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from verl_contracts.weights import EndpointInfo, Plan, TensorMeta


def many(count: int = 60, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return more than the ring holds at once with a bucket of 1 KiB."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{index}": torch.randn(256, generator=generator) for index in range(count)}


def ring_of(sender: ShmSender) -> Ring:
    session = sender._session
    assert session is not None
    assert session.ring is not None
    return session.ring


def test_sender_raises_the_receivers_words_when_it_fails_at_tensor_3() -> None:
    with Transfer(DictSource(many()), bucket_bytes=1024) as transfer:
        received, sent = transfer.receive(DictTarget(fail_at=3)), transfer.send()
        failure = error_of(received)
        assert (failure.phase, failure.tensor) == ("transfer", "t2")
        assert "engine refuses t2" in failure.reason
        assert "RuntimeError: engine refuses t2" in error_of(sent).reason
        assert error_of(sent).missing == ("r0 rank 0",)
        assert error_of(sent).tensor is not None


def test_other_receivers_finish_when_one_fails() -> None:
    weights = many()
    with Transfer(DictSource(weights), receivers=3, bucket_bytes=1024) as transfer:
        good = [DictTarget(), DictTarget()]
        received = [transfer.receive(good[0], 0), transfer.receive(good[1], 2)]
        failed = transfer.receive(DictTarget(fail_at=3), 1)
        assert transfer.send().result(20).tensors == len(weights)
        assert error_of(failed).tensor == "t2"
        for report, target in zip(received, good, strict=True):
            report.result(20)
            check_equal(target.weights, weights)


def test_sender_names_the_receiver_that_never_joins() -> None:
    with Transfer(DictSource(many()), bucket_bytes=1024, limit_s=0.5) as transfer:
        begun = time.monotonic()
        failure = error_of(transfer.send())
        assert time.monotonic() - begun < 3
        assert failure.missing == ("r0 rank 0",)
        assert failure.tensor is not None


def test_sender_goes_on_without_a_receiver_that_never_joins() -> None:
    weights = many()
    with Transfer(DictSource(weights), receivers=2, bucket_bytes=1024, limit_s=2) as transfer:
        target = DictTarget()
        received = transfer.receive(target, 0)
        transfer.send().result(20)
        received.result(20)
        check_equal(target.weights, weights)
        late = error_of(transfer.receive(DictTarget(), 1))
        assert "went on without us" in late.reason


def test_stalled_receiver_is_dropped_and_told() -> None:
    weights = many()
    release = threading.Event()
    with Transfer(DictSource(weights), receivers=2, bucket_bytes=1024, limit_s=2) as transfer:
        good, stalled = DictTarget(), DictTarget(hold=(2, release))
        received = [transfer.receive(good, 0), transfer.receive(stalled, 1)]
        transfer.send().result(20)
        received[0].result(20)
        check_equal(good.weights, weights)
        release.set()
        assert "went on without us" in error_of(received[1]).reason


def test_single_stalled_receiver_ends_the_send_at_the_deadline() -> None:
    release = threading.Event()
    with Transfer(DictSource(many()), bucket_bytes=1024, limit_s=0.5) as transfer:
        received, sent = transfer.receive(DictTarget(hold=(2, release))), transfer.send()
        assert error_of(sent).missing == ("r0 rank 0",)
        release.set()
        assert "the sender failed" in error_of(received).reason


def test_receiver_names_the_sender_that_never_sends() -> None:
    with Transfer(DictSource(many()), limit_s=0.3) as transfer:
        failure = error_of(transfer.receive(DictTarget()))
        assert failure.missing == ("trainer rank 0",)
        assert "0 of 60 tensors" in failure.reason


def test_abort_ends_a_blocked_send_and_tells_the_receiver() -> None:
    gate = threading.Event()
    with Transfer(DictSource(many()), bucket_bytes=1024) as transfer:
        target = DictTarget(hold=(2, gate))
        received, sent = transfer.receive(target), transfer.send()
        assert target.holding.wait(10)
        transfer.sender.abort("enough")
        assert "aborted: enough" in error_of(sent).reason
        gate.set()
        assert "aborted: enough" in error_of(received).reason


def test_abort_ends_a_blocked_receive_and_tells_the_sender() -> None:
    release = threading.Event()
    with Transfer(DictSource(many()), bucket_bytes=64) as transfer:
        target = DictTarget(hold=(2, release))
        sent, received = transfer.send(), transfer.receive(target)
        assert target.holding.wait(10)
        transfer.receivers[0].abort("enough")
        assert "aborted: enough" in error_of(sent).reason
        release.set()
        assert "aborted: enough" in error_of(received).reason


def test_abort_before_the_receiver_joins_ends_both_sides() -> None:
    with Transfer(DictSource(many()), bucket_bytes=64) as transfer:
        transfer.receivers[0].abort("enough")
        assert "aborted: enough" in error_of(transfer.send()).reason
        assert "aborted: enough" in error_of(transfer.receive(DictTarget())).reason


def test_late_end_of_a_stalled_receive_does_not_fail_the_next_one() -> None:
    weights = many()
    release = threading.Event()
    with Transfer(DictSource(weights), bucket_bytes=1024, limit_s=0.5) as first:
        stalled = first.receive(DictTarget(hold=(2, release)))
        error_of(first.send())
        first.close_endpoints()
        with Transfer(DictSource(weights), bucket_bytes=1024, endpoints=first) as second:
            target = DictTarget(hold=(3, release))
            received, sent = second.receive(target), second.send()
            assert target.holding.wait(10)
            release.set()
            error_of(stalled)
            sent.result(20)
            received.result(20)
            check_equal(target.weights, weights)


def test_receiver_that_closes_before_it_joins_is_not_waited_for() -> None:
    weights = many()
    with Transfer(DictSource(weights), receivers=2, bucket_bytes=1024) as transfer:
        transfer.receivers[1].close()
        target = DictTarget()
        received = transfer.receive(target, 0)
        begun = time.monotonic()
        transfer.send().result(20)
        assert time.monotonic() - begun < 5
        received.result(20)
        check_equal(target.weights, weights)


def test_closing_the_sender_ends_a_receive() -> None:
    with Transfer(DictSource(many())) as transfer:
        received = transfer.receive(DictTarget())
        transfer.sender.close()
        assert "clos" in error_of(received).reason


def test_cut_source_is_an_error_with_counts_on_both_sides() -> None:
    with Transfer(DictSource(many(), stop_after=30), bucket_bytes=1024) as transfer:
        target = DictTarget()
        received, sent = transfer.receive(target), transfer.send()
        assert "30 of 60 tensors, 30720 of 61440 bytes" in error_of(sent).reason
        assert "30 of 60 tensors" in error_of(received).reason


def test_end_frame_before_the_last_tensor_is_a_cut_stream() -> None:
    with Transfer(DictSource(many())) as transfer:
        received = transfer.receive(DictTarget())
        ring = ring_of(transfer.sender)
        geometry = Geometry.choose(transfer.plan.manifest, bucket_bytes=1024)
        ring.announce(readers=1, total_bytes=geometry.total_bytes, fingerprint=fingerprint(transfer.plan.manifest))
        ring.put_table(encode_end(EndRecord(tensors=0, num_bytes=0, digest="00" * 16)))
        ring.publish(ring.generation, END_FRAME, 1)
        failure = error_of(received)
        assert "the stream was cut: it ended after 0 of 60 tensors, 0 of 61440 bytes" in failure.reason
        assert failure.tensor == "t0"


def test_flipped_byte_is_found_before_it_is_loaded() -> None:
    weights = {"first": torch.zeros(8), "second": torch.arange(100.0)}
    release = threading.Event()
    with Transfer(DictSource(weights), bucket_bytes=4096) as transfer:
        target = DictTarget(hold=(1, release))
        received, sent = transfer.receive(target), transfer.send()
        assert target.holding.wait(10)
        memory = ring_of(transfer.sender).memory
        at = bytes(memory.bytes).index(weights["second"].numpy().tobytes())
        memory.bytes[at + 17] ^= 1
        release.set()
        failure = error_of(received)
        assert failure.tensor == "second"
        assert "changed on the way" in failure.reason
        assert "second" not in target.weights
        assert "changed on the way" in error_of(sent).reason


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"t1": torch.zeros(255)}, "t1 (255,) float32 where its manifest says t1 (256,) float32"),
        ({"t1": torch.zeros(256, dtype=torch.float64)}, "t1 (256,) float64"),
    ],
)
def test_source_that_differs_from_its_manifest_is_refused(wrong: dict[str, torch.Tensor], words: str) -> None:
    with Transfer(DictSource(many(4), wrong=wrong)) as transfer:
        received, sent = transfer.receive(DictTarget()), transfer.send()
        assert words in error_of(sent).reason
        assert words in error_of(received).reason
        assert error_of(sent).tensor == "t1"


class _Partial:
    """Reports one name less than it was given, or stops taking."""

    def __init__(self, *, stop: bool) -> None:
        self._stop = stop

    def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
        names = []
        for meta, _ in items:
            names.append(meta.name)
            if self._stop:
                break
        return LoadReport(loaded=tuple(names) if self._stop else tuple(names[:-1]))


@pytest.mark.parametrize(
    ("stop", "words"), [(True, "stopped taking tensors after"), (False, "neither loaded nor skipped t3")]
)
def test_engine_that_does_not_account_for_every_tensor_is_refused(stop: bool, words: str) -> None:
    with Transfer(DictSource(many(4))) as transfer:
        received, sent = transfer.receive(_Partial(stop=stop)), transfer.send()
        assert words in error_of(received).reason
        assert words in error_of(sent).reason


def test_further_sender_ranks_only_gather() -> None:
    source = DictSource(many())
    sender = ShmSender(owner="trainer", rank=1, clock=CLOCK)
    with Transfer(DictSource(many())) as transfer:
        sender.prepare(source.manifest(1), session=transfer.plan.session)
        report = sender.send(transfer.plan, source, deadline=Deadline.after(CLOCK, 5))
        assert (report.tensors, source.taken) == (0, 60)
        sender.close()


def test_writer_gathers_to_the_end_when_other_ranks_gather_with_it() -> None:
    source = DictSource(many())
    sender = ShmSender(owner="trainer", rank=0, clock=CLOCK)
    receiver = ShmReceiver(owner="r0", clock=CLOCK)
    session = new_session()
    manifest = source.manifest(1)
    first = sender.prepare(manifest, session=session)
    second = ShmSender(owner="trainer", rank=1, clock=CLOCK).prepare(manifest, session=session)
    plan = SingleHostPlanner().plan(
        manifest,
        session=session,
        senders=[first, second],
        receivers=[receiver.prepare(session=session, rank=0)],
        bucket_bytes=64,
    )
    sender.abort("before it began")
    with pytest.raises(Exception, match="before it began"):
        sender.send(plan, source, deadline=Deadline.after(CLOCK, 5))
    assert source.taken == 60
    sender.close()
    receiver.close()


def test_calls_out_of_order_are_state_errors() -> None:
    sender = ShmSender(owner="trainer", rank=0, clock=CLOCK)
    receiver = ShmReceiver(owner="r0", clock=CLOCK)
    with Transfer(DictSource(many())) as transfer:
        deadline = Deadline.after(CLOCK, 1)
        with pytest.raises(StateError, match="prepare"):
            sender.send(transfer.plan, DictSource({}), deadline=deadline)
        with pytest.raises(StateError, match="prepared"):
            receiver.receive(transfer.plan, DictTarget(), deadline=deadline)
        received = transfer.receive(DictTarget())
        transfer.send().result(20)
        received.result(20)
        with pytest.raises(StateError, match="sent already"):
            transfer.sender.send(transfer.plan, transfer.source, deadline=deadline)
        with pytest.raises(StateError, match="prepared"):
            transfer.receivers[0].receive(transfer.plan, DictTarget(), deadline=deadline)
    sender.close()
    receiver.close()


# Real processes, killed without a chance to say anything.


def _receive_and_die(pipe: Connection, session: str) -> None:
    class Target:
        def load(self, items: Iterable[tuple[TensorMeta, torch.Tensor]], /) -> LoadReport:
            for index, _ in enumerate(items):
                if index == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            return LoadReport(loaded=())

    receiver = ShmReceiver(owner="dying", clock=CLOCK)
    pipe.send(receiver.prepare(session=session, rank=0))
    receiver.receive(pipe.recv(), Target(), deadline=Deadline.after(CLOCK, 30))


def test_killed_receiver_is_dropped_and_the_other_finishes() -> None:
    weights = many()
    session = new_session()
    ours, child = _spawn(_receive_and_die, session)
    endpoint: EndpointInfo = ours.recv()
    source, target = DictSource(weights), DictTarget()
    sender, receiver = ShmSender(owner="trainer", rank=0, clock=CLOCK), ShmReceiver(owner="r1", clock=CLOCK)
    manifest = source.manifest(1)

    def plan_for(receivers: list[EndpointInfo]) -> Plan:
        return SingleHostPlanner().plan(
            manifest,
            session=session,
            senders=[sender.prepare(manifest, session=session)],
            receivers=receivers,
            bucket_bytes=1024,
        )

    plan = plan_for([endpoint, receiver.prepare(session=session, rank=0)])
    ours.send(plan)
    deadline = Deadline.after(CLOCK, 30)
    begun = time.monotonic()
    thread = threading.Thread(target=lambda: receiver.receive(plan, target, deadline=deadline))
    thread.start()
    sender.send(plan, source, deadline=deadline)
    thread.join(10)
    assert time.monotonic() - begun < 10
    check_equal(target.weights, weights)
    # The child is a zombie now, for nobody has waited for it: still dead. Alone, it ends the send.
    with pytest.raises(Exception, match=r"process \d+ is dead") as caught:
        sender.send(plan_for([endpoint]), source, deadline=deadline)
    assert "dying rank 0" in str(caught.value)
    sender.close()
    receiver.close()
    child.join(10)
    assert named() == []


class _DyingSource(DictSource):
    def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for index, item in enumerate(super().tensors()):
            if index == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def _send_and_die(pipe: Connection, session: str, before_sending: bool) -> None:
    source = _DyingSource(many())
    sender = ShmSender(owner="trainer", rank=0, clock=CLOCK)
    manifest = source.manifest(1)
    pipe.send((manifest, sender.prepare(manifest, session=session)))
    plan = pipe.recv()
    if before_sending:
        os.kill(os.getpid(), signal.SIGKILL)
    sender.send(plan, source, deadline=Deadline.after(CLOCK, 30))


def _spawn(target: Callable[..., None], *args: object) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *args), daemon=True)
    child.start()
    theirs.close()
    return ours, child


@pytest.mark.parametrize("before_sending", [True, False])
def test_killed_sender_is_an_error_with_counts_and_leaves_nothing(before_sending: bool) -> None:
    session = new_session()
    ours, child = _spawn(_send_and_die, session, before_sending)
    manifest, endpoint = ours.recv()
    receiver = ShmReceiver(owner="r0", clock=CLOCK)
    plan = SingleHostPlanner().plan(
        manifest,
        session=session,
        senders=[endpoint],
        receivers=[receiver.prepare(session=session, rank=0)],
        bucket_bytes=1024,
    )
    ours.send(plan)
    begun = time.monotonic()
    with pytest.raises(Exception, match=r"is dead; have \d+ of 60 tensors") as caught:
        receiver.receive(plan, DictTarget(), deadline=Deadline.after(CLOCK, 30))
    assert time.monotonic() - begun < 10
    assert "trainer rank 0" in str(caught.value)
    receiver.close()
    child.join(10)
    assert named() == []


def test_killed_sender_that_nobody_reached_leaves_nothing() -> None:
    before = held()
    ours, child = _spawn(_send_and_die, new_session(), True)
    ours.recv()
    receiver = ShmReceiver(owner="r0", clock=CLOCK)
    receiver.prepare(session="s", rank=0)
    ours.send(None)
    child.join(10)
    assert named() == []
    del receiver
    assert held() == before


def test_receivers_in_processes_of_their_own_get_what_was_sent() -> None:
    weights = sample_weights()
    session = new_session()
    pipes = [_spawn(_receive_well, session, index)[0] for index in range(2)]
    source = DictSource(weights)
    sender = ShmSender(owner="trainer", rank=0, clock=CLOCK)
    manifest = source.manifest(1)
    plan = SingleHostPlanner().plan(
        manifest,
        session=session,
        senders=[sender.prepare(manifest, session=session)],
        receivers=[pipe.recv() for pipe in pipes],
        bucket_bytes=2048,
    )
    for pipe in pipes:
        pipe.send(plan)
    sent = sender.send(plan, source, deadline=Deadline.after(CLOCK, 30))
    for pipe in pipes:
        report, arrived = pipe.recv()
        assert report.digests == sent.digests
        assert arrived == {name: tensor.tolist() for name, tensor in weights.items()}
    sender.close()
    assert named() == []


def _receive_well(pipe: Connection, session: str, index: int) -> None:
    receiver = ShmReceiver(owner=f"r{index}", clock=CLOCK)
    target = DictTarget()
    pipe.send(receiver.prepare(session=session, rank=0))
    report = receiver.receive(pipe.recv(), target, deadline=Deadline.after(CLOCK, 30))
    receiver.close()
    pipe.send((report, {name: tensor.tolist() for name, tensor in target.weights.items()}))
