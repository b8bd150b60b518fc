"""The disk backend between its two roles: what the files are, and how faults end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from ckpt_folders import (
    CLOCK,
    WEIGHTS,
    SenderProcess,
    error_on_a_full_disk,
    folder_of,
    plan_of,
    receiver_at,
    sync,
)
from safetensors.torch import load_file

from verl_ckpt_engine.disk import FOLDER_VARIABLE, DiskBackend, DiskSender
from verl_contracts.clock import Deadline
from verl_contracts.errors import ConfigError, StateError, WeightSyncError
from verl_contracts.plugins import families, load_plugin
from verl_contracts.testing.suites.weights import WeightBackendSuite
from verl_contracts.testing.tensors import ListSource
from verl_contracts.testing.transfers import ProcessReceiver, Session, ThreadReceiver
from verl_contracts.weights import EndpointInfo, Manifest

if TYPE_CHECKING:
    from verl_contracts.weights import WeightBackend

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for weights, one for each test."""
    folder = tmp_path / "weights"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


class TestDiskBackend(WeightBackendSuite):
    def backend(self) -> type[WeightBackend]:
        return DiskBackend


def test_backend_is_found_by_name() -> None:
    assert load_plugin(families.WEIGHT_BACKEND, "disk", key="backend") is DiskBackend


def test_shards_are_files_that_others_read_and_none_larger_than_a_bucket() -> None:
    large = {"large": torch.randn(80, 40).t()}
    weights = {**WEIGHTS, "byte": torch.ones(3, dtype=torch.uint8), "scalar": torch.tensor(2.5), **large}
    _, folder = sync(7, weights)
    shards = sorted(folder.glob("*.safetensors"))
    found = [load_file(shard) for shard in shards]
    for shard, part in zip(shards, found, strict=True):
        size = sum(tensor.numel() * tensor.element_size() for tensor in part.values())
        assert size <= 6000 or list(part) == ["large"]
        header = json.loads(shard.read_bytes()[8 : 8 + int.from_bytes(shard.read_bytes()[:8], "little")])
        for name, tensor in part.items():
            assert header[name]["data_offsets"][0] % tensor.element_size() == 0, "others map it in place"
    together = {name: tensor for part in found for name, tensor in part.items()}
    assert together.keys() == weights.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in weights.items())
    assert 3 < len(shards) < len(weights), "several tensors share a file"


def test_marker_says_what_is_where() -> None:
    _, folder = sync(7)
    said = json.loads((folder / "manifest.json").read_text())
    assert (said["version"], said["num_tensors"], said["num_bytes"]) == (7, 9, 9 * 700 * 4)
    for each in said["tensors"]:
        assert each["name"] in load_file(folder / each["shard"])
        assert each["shape"] == [700]
        assert len(each["digest"]) == 16


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives(name: str) -> None:
    dtype = getattr(torch, name)
    bits = torch.arange(256, dtype=torch.uint8)
    tensor = (bits % 2).bool() if name == "bool" else bits.view(dtype)
    side = ThreadReceiver(DiskBackend, "r0")
    with Session(DiskBackend, ListSource({"odd": torch.ones(3, dtype=torch.uint8), "x": tensor}), [side]) as session:
        session.transfer()
    assert torch.equal(side.target.tensors["x"].view(torch.uint8), tensor.view(torch.uint8))


def test_dtype_that_files_lack_is_refused_before_anything_is_paused(root: Path) -> None:
    sender = DiskSender(owner="trainer", rank=0, clock=CLOCK)
    manifest = ListSource({"x": torch.ones(2, dtype=torch.complex128)}).manifest(1)
    with pytest.raises(ConfigError, match="'x' has dtype 'complex128'"):
        sender.prepare(manifest, session="s")


def test_sender_that_is_killed_ends_the_receiver_and_is_swept_by_the_next(root: Path) -> None:
    sender, side = SenderProcess(), ThreadReceiver(DiskBackend, "r0")
    plan = plan_of(ListSource(WEIGHTS), "killed", sender.prepare(), [side.prepare("killed", 0)])
    running = side.start(plan, 50.0)
    sender.send(plan)
    sender.kill()
    ended = running.end()
    assert isinstance(ended.error, WeightSyncError)
    assert "process is dead" in str(ended.error)
    assert ended.error.missing == ("trainer rank 0",)
    assert folder_of(plan).exists()
    _, newer = sync(2)
    assert list(root.iterdir()) == [newer]


def test_receiver_that_is_killed_before_it_joins_ends_the_sender() -> None:
    side = ProcessReceiver(DiskBackend, "victim")
    with Session(DiskBackend, ListSource(WEIGHTS), [side]) as session:
        side.kill()
        ended = session.send(50.0).end()
    assert isinstance(ended.error, WeightSyncError)
    assert "process is dead" in str(ended.error)
    assert ended.error.missing == ("victim rank 0",)


def test_byte_that_changes_on_the_disk_costs_the_receiver_and_is_named() -> None:
    written = threading.Event()
    source = ListSource(WEIGHTS, before=lambda index: written.set() if index == len(WEIGHTS) - 1 else None)
    side = ThreadReceiver(DiskBackend, "r0")
    with Session(DiskBackend, source, [side], bucket_bytes=6000) as session:
        sending = session.send(30.0)
        _wait(written)
        path = folder_of(session.plan) / "00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        received, sent = side.start(session.plan, 30.0).end(), sending.end()
    for ended in (received, sent):
        assert isinstance(ended.error, WeightSyncError)
        assert "the payload was changed on the way" in str(ended.error)
    assert list(side.target.tensors) == ["w0", "w1", "w2"], "none that is wrong is loaded"


def test_straggler_is_left_behind_when_another_one_is_done() -> None:
    go_on = threading.Event()
    fast = ThreadReceiver(DiskBackend, "fast")
    slow = ThreadReceiver(DiskBackend, "slow", before=lambda _: _wait(go_on))
    with Session(DiskBackend, ListSource(WEIGHTS), [fast, slow]) as session:
        running = [side.start(session.plan, 30.0) for side in (fast, slow)]
        sent = session.send(2.0).end()
        go_on.set()
        ends = [each.end() for each in running]
    assert sent.error is None
    assert sent.seconds < 2.0
    assert ends[0].error is None
    assert ends[1].error is None, "the files are there for it all the same"


def test_receiver_that_was_aborted_before_it_began_tells_the_sender() -> None:
    side = ThreadReceiver(DiskBackend, "r0")
    with Session(DiskBackend, ListSource(WEIGHTS), [side]) as session:
        side.receiver.abort("the engine is gone")
        received = side.start(session.plan, 30.0).end()
        sent = session.send(30.0).end()
    for ended in (received, sent):
        assert isinstance(ended.error, WeightSyncError)
        assert "the engine is gone" in str(ended.error)
        assert ended.seconds < 10.0


def test_full_disk_is_an_error_that_says_where_and_how_much(root: Path) -> None:
    (sent, received), left = error_on_a_full_disk(1 << 22)
    for words in (sent, received):
        for wanted in (
            str(root),
            "'large'",
            f"{(3 << 20) + 40} of {(4 << 22) + 40} bytes were written",
            FOLDER_VARIABLE,
        ):
            assert wanted in words
    assert left == []


def test_disk_without_room_is_refused_before_anything_is_paused(root: Path) -> None:
    sender = DiskSender(owner="trainer", rank=0, clock=CLOCK)
    with pytest.raises(WeightSyncError, match=f"{1 << 60} bytes, and only .* are free at {root}") as caught:
        sender.prepare(Manifest(version=1, tensors=(), num_bytes=1 << 60), session="s")
    assert caught.value.phase == "prepare"
    assert list(root.iterdir()) == []


def test_receiver_that_does_not_see_the_folder_names_it_and_the_variable(tmp_path: Path) -> None:
    begun = time.monotonic()
    error = receiver_at(str(tmp_path / "nowhere" / "v1"), scope="another machine", limit_s=0.5)
    assert isinstance(error, WeightSyncError)
    assert str(tmp_path / "nowhere" / "v1") in str(error)
    assert FOLDER_VARIABLE in str(error)
    assert time.monotonic() - begun >= 0.5, "on another machine it may still come in sight"


def test_session_is_used_once() -> None:
    sender, source = DiskSender(owner="trainer", rank=0, clock=CLOCK), ListSource(WEIGHTS)
    other = DiskSender(owner="trainer", rank=0, clock=CLOCK)
    sender.prepare(source.manifest(1), session="same")
    with pytest.raises(StateError, match="'same' was used already"):
        other.prepare(source.manifest(1), session="same")
    sender.close()
    here = EndpointInfo(owner="trainer", rank=0, node="n", address={"folder": "/nowhere"})
    plan = plan_of(source, "same", here, [EndpointInfo(owner="r0", rank=0, node="n")])
    with pytest.raises(StateError, match="None was prepared"):
        sender.send(plan, source, deadline=Deadline.after(CLOCK, 5.0))


@pytest.mark.parametrize(
    ("senders", "receivers", "bucket_bytes", "words"),
    [
        ([0], [], 1, "no receivers"),
        ([], ["r0"], 1, "sender ranks are []"),
        ([1], ["r0"], 1, "sender ranks are [1]"),
        ([0], ["r0", "r0"], 1, "r0 rank 0 is listed twice"),
        ([0], ["r0"], 0, "bucket_bytes is 0"),
    ],
)
def test_planner_refuses(senders: list[int], receivers: list[str], bucket_bytes: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DiskBackend.planner_class().plan(
            ListSource({}).manifest(1),
            session="s",
            senders=[EndpointInfo(owner="trainer", rank=rank, node="a") for rank in senders],
            receivers=[EndpointInfo(owner=owner, rank=0, node="b") for owner in receivers],
            bucket_bytes=bucket_bytes,
        )
    assert words in str(caught.value)


def _wait(event: threading.Event) -> None:
    assert event.wait(30.0)
