"""Versions under a root: who may load them without a sender, and when they go."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from ckpt_folders import CLOCK, WEIGHTS, SenderProcess, folder_of, sync

from verl_ckpt_engine.disk import (
    FOLDER_VARIABLE,
    DiskBackend,
    DiskSender,
    find_root,
    latest_complete,
    load_folder,
    manifest_of,
)
from verl_contracts.errors import ConfigError, WeightSyncError
from verl_contracts.testing.tensors import KeepingTarget, ListSource
from verl_contracts.testing.transfers import Session, ThreadReceiver, run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for weights, one for each test."""
    folder = tmp_path / "weights"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def test_latest_complete_version_loads_without_a_sender(root: Path) -> None:
    assert latest_complete(root) is None, "not even the root exists"
    sender, _ = sync(3)
    del sender
    folder = latest_complete(root)
    assert folder is not None
    assert manifest_of(folder) == ListSource(WEIGHTS).manifest(3)
    target = KeepingTarget(skip=("w4",))
    report = load_folder(folder, target)
    assert report.skipped == ("w4",)
    assert len(report.loaded) == len(WEIGHTS) - 1
    assert all(torch.equal(target.tensors[name], tensor) for name, tensor in WEIGHTS.items())


def test_sampled_digests_and_an_empty_version_load_too(root: Path) -> None:
    for weights in ({"x": torch.randn(100_000)}, {}):
        side = ThreadReceiver(DiskBackend, "r0")
        with Session(DiskBackend, ListSource(weights), [side], version=2) as session:
            session.plan = replace(session.plan, verification="sampled")
            session.transfer()
        folder, target = latest_complete(root), KeepingTarget()
        assert folder is not None
        load_folder(folder, target)
        assert target.tensors.keys() == weights.keys()


def test_version_being_written_is_not_there_for_those_who_come_late(root: Path) -> None:
    _, first = sync(1)
    seen: list[Path | None] = []
    source = ListSource(WEIGHTS, before=lambda _: seen.append(latest_complete(root)))
    side = ThreadReceiver(DiskBackend, "r0")
    with Session(DiskBackend, source, [side], bucket_bytes=3000, version=2) as session:
        session.transfer()
    assert seen == [first] * len(WEIGHTS)
    assert latest_complete(root) == folder_of(session.plan)


def test_late_ones_load_whole_versions_while_the_sender_writes_and_cleans_up(root: Path) -> None:
    stop, loaded, gone = threading.Event(), list[tuple[int, set[float]]](), list[str]()

    def load_again_and_again() -> None:
        while not stop.is_set():
            folder = latest_complete(root)
            if folder is None:
                continue
            target = KeepingTarget()
            try:
                version = manifest_of(folder).version
                load_folder(folder, target)
            except WeightSyncError as exc:
                if exc.phase != "connect":
                    raise
                gone.append(str(exc))
                continue
            loaded.append((version, {value for each in target.tensors.values() for value in each.tolist()}))

    readers = [run_in_thread(load_again_and_again) for _ in range(2)]
    sender: DiskSender | None = None
    for version in range(1, 41):
        weights = {f"w{index}": torch.full((500,), float(version)) for index in range(6)}
        sender, _ = sync(version, weights, sender=sender)
    stop.set()
    for reader in readers:
        assert reader.end().error is None
    assert {version for version, _ in loaded} - {40}, "none was loaded while the sender was at work"
    assert all(values == {float(version)} for version, values in loaded)


def test_version_that_is_being_loaded_is_left_in_peace(root: Path) -> None:
    sender, first = sync(1)
    reached, go_on = threading.Event(), threading.Event()

    def hold(index: int) -> None:
        if index == 2:
            reached.set()
            assert go_on.wait(30.0)

    target = KeepingTarget(before=hold)
    loading = run_in_thread(lambda: load_folder(first, target))
    assert reached.wait(30.0)
    for version in (2, 3):
        sync(version, {"other": torch.ones(3)}, sender=sender)
        assert first.exists()
    go_on.set()
    assert loading.end().error is None
    assert all(torch.equal(target.tensors[name], tensor) for name, tensor in WEIGHTS.items())
    _, last = sync(4, sender=sender)
    assert list(root.iterdir()) == [last]


def _without_marker(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _damaged_marker(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def _newer_format(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))


def _removed(folder: Path) -> None:
    shutil.rmtree(folder)


def _cut_shard(folder: Path) -> None:
    path = folder / "00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def _cut_header(folder: Path) -> None:
    os.truncate(folder / "00001.safetensors", 40)


def _empty_shard(folder: Path) -> None:
    os.truncate(folder / "00001.safetensors", 0)


def _flipped_byte(folder: Path) -> None:
    path = folder / "00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _missing_shard(folder: Path) -> None:
    (folder / "00002.safetensors").unlink()


def _shard_of_another_version(folder: Path) -> None:
    side = ThreadReceiver(DiskBackend, "r0")
    with Session(DiskBackend, ListSource(WEIGHTS), [side], bucket_bytes=6000, version=9) as session:
        session.transfer()
        shutil.copy(folder_of(session.plan) / "00001.safetensors", folder)


def _marker_of_other_bytes(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "0" * 32}))


@pytest.mark.parametrize(
    ("damage", "phase", "words"),
    [
        (_without_marker, "connect", "no manifest.json, so it is not complete"),
        (_damaged_marker, "connect", "manifest.json is damaged"),
        (_newer_format, "connect", "format safetensors-folder 2, which this release cannot read"),
        (_removed, "connect", "there is no such folder"),
        (_cut_shard, "transfer", "00001.safetensors is damaged: it has"),
        (_cut_header, "transfer", "00001.safetensors is damaged: its header"),
        (_empty_shard, "transfer", "00001.safetensors is damaged: it ends at byte 0"),
        (_flipped_byte, "transfer", "the payload was changed on the way"),
        (_missing_shard, "transfer", "00002.safetensors is missing"),
        (_shard_of_another_version, "transfer", "is of session"),
        (_marker_of_other_bytes, "transfer", "digest over all tensors"),
    ],
)
def test_folder_that_is_not_whole_is_refused(damage: Callable[[Path], None], phase: str, words: str) -> None:
    sender, folder = sync(1)
    damage(folder)
    with pytest.raises(WeightSyncError) as caught:
        load_folder(folder, KeepingTarget())
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
    assert caught.value.phase == phase
    sender.close()


def test_engine_that_refuses_is_named_by_what_it_says() -> None:
    def refuse(index: int) -> None:
        if index == 3:
            raise OSError("no memory on the device")

    _, folder = sync(1)
    with pytest.raises(WeightSyncError, match=r"'w3': loading .* no memory on the device"):
        load_folder(folder, KeepingTarget(before=refuse))


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_newest_complete_versions_stay(root: Path, keep: int) -> None:
    sender = DiskSender(owner="trainer", rank=0, clock=CLOCK, keep=keep)
    folders = [sync(version, sender=sender)[1] for version in range(1, 5)]
    assert sorted(root.iterdir()) == folders[len(folders) - keep :]


def test_session_that_failed_is_removed_at_once_and_the_version_before_it_stays(root: Path) -> None:
    sender, first = sync(1)
    side = ThreadReceiver(DiskBackend, "absent")
    with Session(DiskBackend, ListSource(WEIGHTS), [side], version=2, sender=sender) as session:
        assert isinstance(session.send(0.2).end().error, WeightSyncError)
    assert list(root.iterdir()) == [first]


def test_close_while_a_send_runs_removes_the_folder(root: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(index: int) -> None:
        if index == 4:
            reached.set()
            assert go_on.wait(30.0)

    sender = DiskSender(owner="trainer", rank=0, clock=CLOCK)
    session = Session(DiskBackend, ListSource(WEIGHTS, before=hold), [ThreadReceiver(DiskBackend, "r0")], sender=sender)
    sending = session.send(30.0)
    assert reached.wait(30.0)
    sender.close()
    assert list(root.iterdir()) == []
    go_on.set()
    assert "closed before the end" in str(sending.end().error)
    _, folder = sync(2, sender=sender)
    assert list(root.iterdir()) == [folder]


def test_versions_of_another_sender_that_lives_stay_and_those_of_one_that_is_gone_go(root: Path) -> None:
    one, first = sync(1)
    other, second = sync(8)
    assert sorted(root.iterdir()) == [first, second]
    assert latest_complete(root) == second, "the one that became complete last, whatever its number"
    del one
    _, third = sync(9, sender=other)
    assert list(root.iterdir()) == [third]


def test_session_of_a_sender_that_lives_is_not_swept(root: Path) -> None:
    process = SenderProcess()
    address = process.prepare().address
    _, folder = sync(1)
    assert {path.name for path in root.iterdir()} == {folder.name, Path(address["folder"]).name}
    process.kill()
    _, folder = sync(2)
    assert latest_complete(root) == folder
    assert Path(address["folder"]).name not in {path.name for path in root.iterdir()}


def test_what_was_being_removed_or_begun_long_ago_is_swept(root: Path) -> None:
    sync(1)
    for name in (".removed-abc", ".new-old", ".new-just-now"):
        (root / name).mkdir()
    os.utime(root / ".new-old", (0, 0))
    (root / "notes").mkdir()
    _, folder = sync(2)
    assert {path.name for path in root.iterdir()} == {folder.name, "notes", ".new-just-now"}


def test_default_root_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    root = tmp_path / f"verl-disk-weights-{os.getuid()}"
    assert find_root() == root
    assert find_root().stat().st_mode & 0o777 == 0o700
    root.chmod(0o755)
    with pytest.raises(ConfigError, match=r"open to others .mode 755."):
        find_root()
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        find_root()
    root.unlink()
    root.write_text("")
    with pytest.raises(ConfigError, match=rf"cannot be made.*{FOLDER_VARIABLE}"):
        find_root()


def test_default_root_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    owner = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, not {owner + 1}"):
        find_root()
