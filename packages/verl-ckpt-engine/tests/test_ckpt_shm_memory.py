"""What is kept between syncs, who may still write to it, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
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
from verl_ckpt_engine.shm import ShmSender
from verl_ckpt_engine.shm.frames import DATA_FRAME, Record
from verl_ckpt_engine.shm.memory import FILE_PREFIX, SharedMemory
from verl_ckpt_engine.shm.ring import Ring
from verl_ckpt_engine.shm.waiting import ProcessId, process_scope
from verl_ckpt_engine.tally import fingerprint
from verl_contracts.clock import Deadline
from verl_contracts.errors import ConfigError
from verl_contracts.weights import EndpointInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_contracts.weights import TensorMeta


def many(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{index}": torch.randn(256, generator=generator) for index in range(60)}


def ring_of(sender: ShmSender) -> Ring:
    session = sender._session
    assert session is not None
    assert session.ring is not None
    return session.ring


def sync(transfer: Transfer, weights: dict[str, torch.Tensor]) -> str:
    """Move everything to every receiver, and return where the sender's memory was."""
    targets = [DictTarget() for _ in transfer.receivers]
    received = [transfer.receive(target, index) for index, target in enumerate(targets)]
    transfer.send().result(20)
    for future, target in zip(received, targets, strict=True):
        future.result(20)
        check_equal(target.weights, weights)
    address = transfer.plan.senders[0].address
    transfer.close_endpoints()
    return f"{address['memory']} {address['identity']}"


def test_ring_and_mappings_serve_the_next_sync() -> None:
    before = held()
    first = Transfer(DictSource(many(0)), receivers=2, bucket_bytes=1024)
    place = sync(first, many(0))
    kept = held()
    mapped = [receiver._ring for receiver in first.receivers]
    for seed in (1, 2):
        again = Transfer(DictSource(many(seed)), receivers=2, bucket_bytes=1024, endpoints=first)
        assert sync(again, many(seed)) == place
        assert [receiver._ring for receiver in again.receivers] == mapped
        again.close()
    assert held() == kept == before + 3  # the ring and two pages
    first.close()
    del first, again, mapped
    assert held() == before


def test_ring_grows_with_the_plan_and_is_given_up_when_it_is_far_too_large() -> None:
    small, large = {"w": torch.ones(100)}, {"w": torch.arange(1e6), "v": torch.ones(3)}
    with Transfer(DictSource(small)) as first:
        place = sync(first, small)
        with Transfer(DictSource(large), endpoints=first) as second:
            assert sync(second, large) == place
            with Transfer(DictSource(small), endpoints=first) as third:
                assert sync(third, small) == place  # too large only turns out here
                with Transfer(DictSource(small), endpoints=first) as fourth:
                    assert sync(fourth, small) != place


def test_nothing_is_kept_when_it_should_not_be() -> None:
    before = held()
    with Transfer(DictSource(many(0)), keep_ring=False) as transfer:
        sync(transfer, many(0))
        assert held() == before


def test_send_that_was_given_up_cannot_write_into_the_next_sync() -> None:
    old, new = many(0), many(1)
    reached, go_on = threading.Event(), threading.Event()

    class Stuck(DictSource):
        def tensors(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
            for index, item in enumerate(super().tensors()):
                if index == 30:
                    reached.set()
                    go_on.wait(20)
                yield item

    with Transfer(Stuck(old), bucket_bytes=1024) as first:
        received, sent = first.receive(DictTarget()), first.send()
        assert reached.wait(10)
        stale = ring_of(first.sender)
        first.close_endpoints()
        assert "closed before the end" in error_of(received).reason
        with Transfer(DictSource(new), bucket_bytes=1024, endpoints=first) as second:
            fresh = ring_of(second.sender)
            assert fresh.memory.address != stale.memory.address
            target = DictTarget()
            arriving, sending = second.receive(target), second.send()
            go_on.set()
            assert "the sender closed before the end" in error_of(sent).reason
            sending.result(20)
            arriving.result(20)
            check_equal(target.weights, new)


def test_frame_of_an_earlier_sync_is_refused() -> None:
    with Transfer(DictSource(many(0)), bucket_bytes=1024) as first:
        sync(first, many(0))
        with Transfer(DictSource(many(1)), bucket_bytes=1024, endpoints=first) as second:
            received = second.receive(DictTarget())
            ring = ring_of(second.sender)
            ring.announce(readers=1, total_bytes=len(ring.memory), fingerprint=fingerprint(second.plan.manifest))
            ring.put_record(0, Record(tensor=0, offset=0, num_bytes=1024, at=0, digest=0))
            ring.publish(ring.generation - 1, DATA_FRAME, 1)
            assert "frame 0 of sync 1 lies where frame 0 of sync 2 was expected" in error_of(received).reason


def test_late_reader_is_told_that_the_ring_serves_another_sync() -> None:
    weights = many(0)
    with Transfer(DictSource(weights), receivers=2, bucket_bytes=1024, limit_s=2) as first:
        received = first.receive(DictTarget(), 0)
        first.send().result(20)  # without the other one, after a second
        received.result(20)
        late = first.plan
        first.sender.close()
        manifest = first.source.manifest(2)
        first.sender.prepare(manifest, session="next")
        ring_of(first.sender).announce(readers=2, total_bytes=1, fingerprint=0)
        with pytest.raises(Exception, match="went on without us after 0 of 60 tensors"):
            first.receivers[1].receive(late, DictTarget(), deadline=Deadline.after(CLOCK, 5))


def test_manifests_that_differ_are_refused_before_anything_is_loaded() -> None:
    with Transfer(DictSource(many(0)), bucket_bytes=1024) as transfer:
        sent = transfer.send()
        renamed = DictSource({f"u{name}": tensor for name, tensor in many(0).items()}).manifest(1)
        plan = SingleHostPlanner().plan(
            renamed,
            session=transfer.plan.session,
            senders=transfer.plan.senders,
            receivers=transfer.plan.receivers,
            bucket_bytes=1024,
        )
        target = DictTarget()
        with pytest.raises(Exception, match="manifest of version 1 is not the one of our plan"):
            transfer.receivers[0].receive(plan, target, deadline=Deadline.after(CLOCK, 5))
        assert target.weights == {}
        assert "is not the one of our plan" in error_of(sent).reason


def test_large_tensors_are_whole_when_they_take_turns() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [700_000, 5, 600_000, 2_000_000, 650_000, 7, 1_900_000, 600_001]
    weights = {f"w{index}": torch.randn(size, generator=generator) for index, size in enumerate(sizes)}
    weights["strided"] = torch.randn(900, 1000, generator=generator).t()
    with Transfer(DictSource(weights), receivers=2, bucket_bytes=4 << 20) as transfer:
        sync(transfer, weights)


# Out of reach, or gone.


def test_memory_that_is_something_else_now_is_not_opened() -> None:
    memory = SharedMemory.create(100)
    address = memory.address
    assert len(SharedMemory.open(address)) == 100
    with pytest.raises(FileNotFoundError, match="something else now"):
        SharedMemory.open(address | {"identity": "1:2"})
    del memory
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(address)


def test_reader_out_of_reach_is_named_with_the_reason() -> None:
    with Transfer(DictSource(many(0))) as transfer:
        endpoint = transfer.plan.receivers[0]
        moved = EndpointInfo(
            owner=endpoint.owner,
            rank=endpoint.rank,
            node=endpoint.node,
            address={**endpoint.address, "memory": "/proc/1/fd/9999"},
        )
        transfer.plan = SingleHostPlanner().plan(
            transfer.plan.manifest,
            session=transfer.plan.session,
            senders=transfer.plan.senders,
            receivers=[moved],
            bucket_bytes=1024,
        )
        failure = error_of(transfer.send())
        assert "out of reach for this process" in failure.reason
        assert "/proc/1/fd/9999" in failure.reason
        assert failure.missing == ("r0 rank 0",)


def test_sender_in_another_container_is_refused_before_the_sync() -> None:
    with Transfer(DictSource(many(0))) as transfer:
        mine = transfer.plan.senders[0]
        other = EndpointInfo(
            owner=mine.owner, rank=0, node=mine.node, address={**mine.address, "scope": "another.4026531836"}
        )
        with pytest.raises(ConfigError, match=r"neither sees the other's processes.*different containers"):
            SingleHostPlanner().plan(
                transfer.plan.manifest,
                session="s",
                senders=[other],
                receivers=transfer.plan.receivers,
                bucket_bytes=1024,
            )


# Systems without nameless memory.


@pytest.fixture
def files_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_files_serve_where_memory_needs_a_name_and_are_removed(files_only: Path) -> None:
    weights = sample_weights()
    with Transfer(DictSource(weights), receivers=2) as transfer:
        assert len(named()) == 3
        sync(transfer, weights)
        assert len(named()) == 2  # the ring goes at once; each reader keeps its page
        with Transfer(DictSource(weights), receivers=2, endpoints=transfer) as again:
            sync(again, weights)
        del again
    del transfer
    held()  # collects garbage
    assert named() == []


def test_file_of_a_killed_process_is_removed_by_the_next_one(files_only: Path) -> None:
    script = (
        "import os, signal, tempfile; del os.memfd_create; "
        f"tempfile.tempdir = {str(files_only)!r}; "
        "from verl_ckpt_engine.shm.memory import SharedMemory; m = SharedMemory.create(10); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    (orphan,) = named()
    mine, foreign = files_only / f"{FILE_PREFIX}x", files_only / f"{FILE_PREFIX}0.1-999999:5-{new_session()}"
    alive = files_only / f"{FILE_PREFIX}{process_scope()}-{ProcessId.of_this_process()}-x"
    for path in (mine, foreign, alive):
        path.touch()
    memory = SharedMemory.create(10)
    assert not orphan.exists()
    assert mine.exists()
    assert foreign.exists()
    assert alive.exists()
    assert Path(memory.address["memory"]).exists()
