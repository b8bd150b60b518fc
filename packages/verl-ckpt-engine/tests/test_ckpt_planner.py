from __future__ import annotations

import pytest

from verl_ckpt_engine.planner import SingleHostPlanner
from verl_contracts.errors import ConfigError
from verl_contracts.weights import EndpointInfo, Manifest, Plan

MANIFEST = Manifest(version=3, tensors=(), num_bytes=0)


def endpoint(owner: str, rank: int = 0, node: str = "here") -> EndpointInfo:
    return EndpointInfo(owner=owner, rank=rank, node=node)


def plan(senders: list[EndpointInfo], receivers: list[EndpointInfo], bucket_bytes: int = 1024) -> Plan:
    return SingleHostPlanner().plan(
        MANIFEST, session="s", senders=senders, receivers=receivers, bucket_bytes=bucket_bytes
    )


def test_plan_orders_senders_by_rank_and_keeps_receivers() -> None:
    made = plan([endpoint("trainer", 1), endpoint("trainer", 0)], [endpoint("r1"), endpoint("r0")])
    assert [sender.rank for sender in made.senders] == [0, 1]
    assert [receiver.owner for receiver in made.receivers] == ["r1", "r0"]
    assert (made.version, made.session, made.bucket_bytes) == (3, "s", 1024)


@pytest.mark.parametrize(
    ("senders", "receivers", "bucket_bytes", "words"),
    [
        (
            [endpoint("trainer")],
            [endpoint("r0", node="there")],
            1,
            ["r0 rank 0 on 'there'", "trainer rank 0 is on 'here'"],
        ),
        ([endpoint("trainer")], [], 1, ["0 receivers"]),
        ([endpoint("trainer")], [endpoint(f"r{i}") for i in range(1025)], 1, ["1025 receivers", "1024"]),
        ([endpoint("trainer")], [endpoint("r0"), endpoint("r0")], 1, ["r0 rank 0 is listed twice"]),
        ([], [endpoint("r0")], 1, ["sender ranks are []"]),
        ([endpoint("trainer", 1)], [endpoint("r0")], 1, ["sender ranks are [1]"]),
        ([endpoint("trainer", 0), endpoint("trainer", 0)], [endpoint("r0")], 1, ["sender ranks are [0, 0]"]),
        ([endpoint("trainer")], [endpoint("r0")], 0, ["bucket_bytes is 0"]),
    ],
)
def test_plan_refuses_what_cannot_be_connected(
    senders: list[EndpointInfo], receivers: list[EndpointInfo], bucket_bytes: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(senders, receivers, bucket_bytes)
    for word in words:
        assert word in str(caught.value)
