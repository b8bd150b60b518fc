# ruff: noqa: D102 - the name of a test says what it requires
"""Conformance of a `WeightBackend`: every bit arrives, whatever the buckets, and every fault ends both sides in time.

Needs torch; the digests are the kit's own.
"""

from __future__ import annotations

import abc
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import pytest

from verl_contracts.errors import ConfigError, WeightSyncError
from verl_contracts.plugins import check_plugin, families
from verl_contracts.testing.suites.base import ContractSuite
from verl_contracts.testing.tensors import KeepingTarget, ListSource, payload_digest
from verl_contracts.testing.transfers import ProcessReceiver, Session, ThreadReceiver
from verl_contracts.weights import WireFormat

if TYPE_CHECKING:
    import torch

    from verl_contracts.testing.transfers import Ended
    from verl_contracts.weights import TransferReport, WeightBackend
else:
    torch = pytest.importorskip("torch")

__all__ = ["WeightBackendSuite"]

KIB = 1024


def _tensors(bucket: int = 16 * KIB) -> dict[str, torch.Tensor]:
    """Return the shapes and dtypes that go wrong: empty, scalar, strided, one byte over a bucket, several buckets."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    over = min(bucket, 1 << 20) + 1
    return {
        "float32": rand(33, 7),
        "empty": rand(0),
        "bfloat16": rand(65, dtype=torch.bfloat16),
        "one byte over": torch.randint(0, 256, (over,), generator=generator, dtype=torch.uint8),
        "scalar": rand(1).reshape(()),
        "transposed": rand(19, 23).t(),
        "every second": rand(64, 6, dtype=torch.float16)[::2, 1::3],
        "expanded": rand(1, 5).expand(9, 5),
        "empty inside": rand(3, 0, 2),
        "int64": torch.arange(-100, 100),
        "bool": torch.tensor([True, False, True]),
        "several buckets": rand(over + 3),
        "float64": rand(11).double(),
        "last": rand(1),
    }


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: payload_digest(tensor) for name, tensor in tensors.items()}


def _failed(ended: Ended[TransferReport], side: str) -> WeightSyncError:
    assert ended.value is None, f"the {side} reported success: {ended.value}"
    assert isinstance(ended.error, WeightSyncError), f"the {side} ended with {ended.error!r}"
    return ended.error


class WeightBackendSuite(ContractSuite, abc.ABC, suite=True):
    """Subclass and write `backend`, a class at the top level of a module."""

    processes: ClassVar[bool] = True
    """Whether sender and receiver may live in different processes."""
    notice_limit_s: ClassVar[float] = 20.0
    """Longest until the death of a peer ends the other side."""

    @abc.abstractmethod
    def backend(self) -> type[WeightBackend]:
        """Return the class."""

    def _works(self) -> None:
        """A full transfer succeeds: what every fault must leave behind."""
        tensors = _tensors()
        backend = self.backend()
        with Session(backend, ListSource(tensors), [ThreadReceiver(backend, "r0")]) as session:
            session.transfer()
            assert session.receivers[0].digests() == _digests(tensors)

    def test_classes_meet_their_contracts(self) -> None:
        check_plugin(families.WEIGHT_BACKEND, self.backend(), key="backend")
        formats = self.backend().wire_formats
        assert formats
        assert all(isinstance(wire, WireFormat) for wire in formats)

    @pytest.mark.parametrize("bucket_bytes", [KIB, 4999, 64 * KIB, 1 << 20, 1 << 26])
    @pytest.mark.parametrize("receivers", [1, 2, 3])
    def test_every_bit_arrives_for_every_bucket_size(self, bucket_bytes: int, receivers: int) -> None:
        backend, tensors = self.backend(), _tensors(bucket_bytes)
        sides = [ThreadReceiver(backend, f"r{number}") for number in range(receivers)]
        with Session(backend, ListSource(tensors), sides, bucket_bytes=bucket_bytes) as session:
            sent, received = session.transfer()
            manifest = session.plan.manifest
        for side in sides:
            assert list(side.target.tensors) == list(tensors), "in order, each once, the empty ones too"
            assert side.digests() == _digests(tensors)
        for report in [sent, *received]:
            assert (report.tensors, report.num_bytes) == (len(tensors), manifest.num_bytes)
            assert report.digests == sent.digests
            assert set(report.digests) == set(tensors)
        assert [(report.owner, report.rank) for report in received] == [(f"r{n}", 0) for n in range(receivers)]

    def test_empty_manifest_is_a_complete_transfer(self) -> None:
        backend = self.backend()
        with Session(backend, ListSource({}), [ThreadReceiver(backend, "r0")]) as session:
            sent, received = session.transfer()
        assert [(report.tensors, report.num_bytes) for report in [sent, *received]] == [(0, 0), (0, 0)]

    def test_same_objects_serve_one_session_after_another(self) -> None:
        backend, sender = self.backend(), None
        side = ThreadReceiver(backend, "r0")
        for size in (3, 70_000, 5):  # what was made for one must neither cramp the next nor show through
            tensors = {**_tensors(), "this time": torch.full((size,), size)}
            side.target = KeepingTarget()
            with Session(backend, ListSource(tensors), [side], sender=sender) as session:
                session.transfer()
                sender = session.sender
            assert side.digests() == _digests(tensors)

    def test_digest_tells_payloads_apart(self) -> None:
        backend = self.backend()
        base = torch.arange(4096, dtype=torch.float32)
        flipped = base.clone()
        flipped.view(torch.uint8)[9001] ^= 1
        swapped = base.clone()
        swapped[[17, 3000]] = swapped[[3000, 17]]
        shifted = base.roll(1)
        payloads = {"base": base, "flipped": flipped, "swapped": swapped, "shifted": shifted, "same": base.clone()}
        payloads["strided, same"] = base.reshape(64, 64).t().contiguous().t().reshape(4096)
        with Session(backend, ListSource(payloads), [ThreadReceiver(backend, "r0")], bucket_bytes=KIB) as session:
            sent, _ = session.transfer()
        digests = sent.digests
        assert digests["base"] == digests["same"] == digests["strided, same"]
        assert len({digests[name] for name in ("base", "flipped", "swapped", "shifted")}) == 4

    def test_skipped_tensors_are_reported(self) -> None:
        backend = self.backend()
        side = ThreadReceiver(backend, "r0")
        side.target._skip = ("last",)
        with Session(backend, ListSource(_tensors()), [side]) as session:
            _, (report,) = session.transfer()
        assert report.skipped == ("last",)

    def test_receiver_that_fails_ends_the_sender_with_its_words(self) -> None:
        def fail(index: int) -> None:
            if index == 3:
                raise OSError("no space left in row 3")

        backend = self.backend()
        source = ListSource({f"w{n}": torch.ones(9000) for n in range(64)})
        with Session(backend, source, [ThreadReceiver(backend, "r0", before=fail)], bucket_bytes=4096) as session:
            running = session.receivers[0].start(session.plan, 30.0)
            sent = session.send(30.0).end()
            received = running.end()
        assert "no space left in row 3" in str(received.error)
        assert "no space left in row 3" in str(_failed(sent, "sender"))
        assert sent.seconds < 10.0, "the sender must not wait for its deadline"
        self._works()

    def test_one_of_two_receivers_fails_and_the_other_is_whole_or_says_so(self) -> None:
        def fail(index: int) -> None:
            if index == 2:
                raise OSError("broken")

        backend, tensors = self.backend(), _tensors()
        sides = [ThreadReceiver(backend, "r0"), ThreadReceiver(backend, "r1", before=fail)]
        with Session(backend, ListSource(tensors), sides, bucket_bytes=KIB) as session:
            running = [side.start(session.plan, 30.0) for side in sides]
            session.send(30.0).end()
            healthy, broken = (each.end() for each in running)
        assert broken.value is None
        if healthy.value is not None:
            assert sides[0].digests() == _digests(tensors)
        else:
            _failed(healthy, "healthy receiver")
        self._works()

    def test_receiver_that_never_joins_is_named_at_the_deadline(self) -> None:
        backend = self.backend()
        source = ListSource({f"w{n}": torch.ones(9000) for n in range(64)})
        with Session(backend, source, [ThreadReceiver(backend, "absent")], bucket_bytes=4096) as session:
            sent = session.send(1.0).end()
        error = _failed(sent, "sender")
        assert any("absent" in name for name in error.missing), f"missing: {error.missing}"
        assert sent.seconds < 10.0

    def test_sender_that_never_sends_ends_the_receiver_at_the_deadline(self) -> None:
        backend = self.backend()
        with Session(backend, ListSource(_tensors()), [ThreadReceiver(backend, "r0")]) as session:
            received = session.receivers[0].start(session.plan, 1.0).end()
        _failed(received, "receiver")
        assert received.seconds < 10.0

    def test_stalled_receiver_ends_the_sender_at_the_deadline(self) -> None:
        go_on = threading.Event()
        backend = self.backend()
        source = ListSource({f"w{n}": torch.ones(9000) for n in range(64)})
        side = ThreadReceiver(backend, "slow", before=lambda index: None if index < 2 else _wait(go_on))
        with Session(backend, source, [side], bucket_bytes=4096) as session:
            running = side.start(session.plan, 30.0)
            sent = session.send(1.0).end()
            go_on.set()
            received = running.end()
        error = _failed(sent, "sender")
        assert any("slow" in name for name in error.missing), f"missing: {error.missing}"
        _failed(received, "receiver")

    @pytest.mark.parametrize("by", ["sender", "receiver"])
    def test_abort_ends_both_sides(self, by: str) -> None:
        reached, go_on = threading.Event(), threading.Event()

        def hold(index: int) -> None:
            if index == 5:
                reached.set()
                _wait(go_on)

        backend = self.backend()
        source = ListSource({f"w{n}": torch.ones(9000) for n in range(64)}, before=hold)
        side = ThreadReceiver(backend, "r0")
        with Session(backend, source, [side], bucket_bytes=4096) as session:
            running, sending = side.start(session.plan, 30.0), session.send(30.0)
            _wait(reached)
            (session.sender if by == "sender" else side.receiver).abort("stopped by the operator")
            go_on.set()
            sent, received = sending.end(), running.end()
        assert sent.seconds < 10.0
        assert received.seconds < 10.0
        _failed(sent, "sender")
        _failed(received, "receiver")
        assert "stopped by the operator" in f"{sent.error} {received.error}"
        self._works()

    def test_abort_ends_a_send_that_nobody_receives(self) -> None:
        backend = self.backend()
        source = ListSource({f"w{n}": torch.ones(9000) for n in range(64)})
        with Session(backend, source, [ThreadReceiver(backend, "absent")], bucket_bytes=4096) as session:
            sending = session.send(30.0)
            time.sleep(0.2)
            session.sender.abort("stopped by the operator")
            sent = sending.end()
        assert "stopped by the operator" in str(_failed(sent, "sender"))
        assert sent.seconds < 10.0

    def test_cut_stream_is_an_error_on_both_sides(self) -> None:
        backend, tensors = self.backend(), _tensors()
        side = ThreadReceiver(backend, "r0")
        with Session(backend, ListSource(tensors, stop_after=7), [side], bucket_bytes=KIB) as session:
            running = side.start(session.plan, 10.0)
            sent, received = session.send(10.0).end(), running.end()
        _failed(sent, "sender")
        _failed(received, "receiver")
        self._works()

    def test_source_that_raises_ends_the_receiver(self) -> None:
        def fail(index: int) -> None:
            if index == 4:
                raise MemoryError("gathering failed")

        backend = self.backend()
        side = ThreadReceiver(backend, "r0")
        with Session(backend, ListSource(_tensors(), before=fail), [side], bucket_bytes=KIB) as session:
            running = side.start(session.plan, 30.0)
            sent, received = session.send(30.0).end(), running.end()
        assert sent.value is None
        assert "gathering failed" in str(sent.error)
        _failed(received, "receiver")
        assert received.seconds < 10.0, "the receiver must not wait for its deadline"
        self._works()

    def test_close_is_legal_in_every_state_and_repeatable(self) -> None:
        backend = self.backend()
        for step in ("fresh", "prepared", "used"):
            side = ThreadReceiver(backend, "r0")
            if step == "fresh":
                side.close()
                side.close()
                continue
            session = Session(backend, ListSource(_tensors()), [side])
            if step == "used":
                session.transfer()
            for _ in range(3):
                session.close()

    def test_planner_refuses_what_it_cannot_connect_naming_it(self) -> None:
        backend = self.backend()
        with Session(backend, ListSource({}), [ThreadReceiver(backend, "r0")]) as session:
            plan = session.plan
            again = backend.planner_class().plan(
                plan.manifest,
                session=plan.session,
                senders=plan.senders,
                receivers=plan.receivers,
                bucket_bytes=plan.bucket_bytes,
            )
            assert again == plan, "the same endpoints give the same plan"
            with pytest.raises(ConfigError):
                backend.planner_class().plan(
                    plan.manifest, session="s", senders=[], receivers=plan.receivers, bucket_bytes=KIB
                )

    def test_processes_receive_every_bit(self) -> None:
        self._needs_processes()
        backend, tensors = self.backend(), _tensors()
        sides = [ProcessReceiver(backend, "r0"), ProcessReceiver(backend, "r1")]
        with Session(backend, ListSource(tensors), sides, bucket_bytes=4 * KIB) as session:
            sent, received = session.transfer()
            assert [side.digests() for side in sides] == [_digests(tensors)] * 2
        assert [report.digests for report in received] == [sent.digests] * 2

    def test_killed_receiver_ends_the_sender_before_the_deadline(self) -> None:
        self._needs_processes()
        backend = self.backend()
        source = ListSource({f"w{n}": torch.ones(50_000) for n in range(64)})
        side = ProcessReceiver(backend, "victim", stall_at=2)
        with Session(backend, source, [side], bucket_bytes=64 * KIB) as session:
            side.start(session.plan, 50.0)
            sending = session.send(50.0)
            time.sleep(0.5)  # time for the receiver to attach; dying earlier is a fault as well
            side.kill()
            sent = sending.end()
        error = _failed(sent, "sender")
        assert any("victim" in name for name in error.missing), f"missing: {error.missing}"
        assert sent.seconds < self.notice_limit_s
        self._works()

    def _needs_processes(self) -> None:
        if not self.processes:
            pytest.skip("the backend connects threads of one process only")


def _wait(event: threading.Event) -> None:
    if not event.wait(30.0):
        raise TimeoutError("the test's own gate was not opened")
