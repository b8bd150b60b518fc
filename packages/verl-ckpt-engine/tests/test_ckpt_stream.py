"""The tree of ranks: who gets it from whom, what a broken rank costs, and strangers at the door."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ckpt_engine.gloo import GlooBackend
from verl_ckpt_engine.stream.lines import FAIL, HELLO, Line, Listener, wait
from verl_ckpt_engine.stream.routes import TreePlanner, children_of_receiver, children_of_sender, parent_of
from verl_contracts.errors import ConfigError, WeightSyncError
from verl_contracts.testing.tensors import ListSource
from verl_contracts.testing.transfers import ProcessReceiver, Session, ThreadReceiver
from verl_contracts.weights import EndpointInfo, Manifest

if TYPE_CHECKING:
    from verl_contracts.weights import Plan

WEIGHTS = {f"w{index}": torch.arange(9000.0) + index for index in range(24)}
LOCAL = {"host": "127.0.0.1"}


def plan_of(senders: int, receivers: int) -> Plan:
    return TreePlanner().plan(
        Manifest(version=1, tensors=(), num_bytes=0),
        session="s",
        senders=[EndpointInfo(owner="trainer", rank=rank, node="n", address=LOCAL) for rank in range(senders)],
        receivers=[EndpointInfo(owner=f"r{index}", rank=0, node="n", address=LOCAL) for index in range(receivers)],
        bucket_bytes=1,
    )


@given(senders=st.integers(1, 5), receivers=st.integers(1, 40))
def test_every_receiver_has_one_parent_that_knows_it_and_nobody_more_than_two_children(
    senders: int, receivers: int
) -> None:
    plan = plan_of(senders, receivers)
    found: dict[int, EndpointInfo] = {}
    for endpoint, children in [
        *((plan.senders[rank], children_of_sender(plan, rank)) for rank in range(senders)),
        *((plan.receivers[index], children_of_receiver(plan, index)) for index in range(receivers)),
    ]:
        assert len(children) <= 2
        for child in children:
            assert child not in found
            found[child] = endpoint
            assert parent_of(plan, child) is endpoint
    assert found.keys() == set(range(receivers))
    for index in range(receivers):
        assert parent_of(plan, index) in (*plan.senders, *plan.receivers[:index]), "parents come before their children"


def test_hosts_that_others_cannot_reach_are_refused() -> None:
    ends = [EndpointInfo(owner="trainer", rank=0, node="a", address={"host": "10.0.0.1"})]
    far = EndpointInfo(owner="r0", rank=0, node="b", address=LOCAL)
    with pytest.raises(ConfigError, match=r"r0 rank 0 on 'b' can be reached at '127.0.0.1' only.*VERL_HOST_IP"):
        TreePlanner().plan(
            Manifest(version=1, tensors=(), num_bytes=0), session="s", senders=ends, receivers=[far], bucket_bytes=1
        )


def test_a_rank_that_cannot_load_hands_on_what_it_gets() -> None:
    def fail(index: int) -> None:
        if index == 3:
            raise OSError("the engine is out of order")

    sides = [ThreadReceiver(GlooBackend, f"r{index}", before=fail if index == 0 else None) for index in range(7)]
    with Session(GlooBackend, ListSource(WEIGHTS), sides, bucket_bytes=64 * 1024) as session:
        running = [side.start(session.plan, 30.0) for side in sides]
        sent = session.send(30.0).end()
        ends = [each.end() for each in running]
    assert sent.error is None
    assert "out of order" in str(ends[0].error)
    for side, end in zip(sides[1:], ends[1:], strict=True):
        assert end.error is None
        assert all(torch.equal(side.target.tensors[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_rank_that_is_killed_costs_those_below_it_and_nobody_else() -> None:
    sides: list[ThreadReceiver | ProcessReceiver] = [
        ProcessReceiver(GlooBackend, "r0", stall_at=2),
        *(ThreadReceiver(GlooBackend, f"r{index}") for index in range(1, 4)),
    ]
    reached = threading.Event()
    source = ListSource(WEIGHTS, before=lambda index: reached.set() if index == 6 else None)
    with Session(GlooBackend, source, sides, bucket_bytes=40_000) as session:
        running = [side.start(session.plan, 30.0) for side in sides]
        sending = session.send(30.0)
        assert reached.wait(20.0)
        first = sides[0]
        assert isinstance(first, ProcessReceiver)
        first.kill()
        sent = sending.end()
        _, other, below, too = (each if index == 0 else each.end() for index, each in enumerate(running))
    assert sent.error is None
    for end in (below, too):
        assert isinstance(end, type(other))
    ends = {"r1": other, "r2": below, "r3": too}
    # With two children a rank, r2 and r3 hang on r0.
    assert ends["r1"].error is None  # type: ignore[union-attr]
    for name in ("r2", "r3"):
        error = ends[name].error  # type: ignore[union-attr]
        assert isinstance(error, WeightSyncError)
        assert error.missing == ("r0 rank 0",)


def test_strangers_are_not_let_in_and_keep_nobody_out() -> None:
    listener = Listener("127.0.0.1")
    port = int(listener.address["port"])
    rude = socket.create_connection(("127.0.0.1", port), timeout=5.0)
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    wrong = Line.connect("127.0.0.1", port, 5.0)
    wrong.send(HELLO, {"token": "guessed", "owner": "r0"})
    good = Line.connect("127.0.0.1", port, 5.0)
    good.send(HELLO, {"token": listener.token, "owner": "r0"})
    found: list[tuple[Line, dict[str, str]]] = []
    while not found:
        wait(listener.sources(), 1.0)
        found = listener.newcomers()
    ((line, said),) = found
    assert said["owner"] == "r0"
    line.send(FAIL, b"words")
    wait([good], 1.0)
    assert good.receive() == [(FAIL, b"words")]
    wait([wrong], 1.0)
    assert wrong.receive() == []
    assert wrong.broken is not None
    for each in (line, good, wrong, listener, rude):
        each.close()
    listener.close()
