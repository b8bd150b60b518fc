"""The command that measures backends: what it prints, what it keeps, and what it says of what it cannot measure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from verl_ckpt_engine.bench.command import main
from verl_ckpt_engine.bench.payload import make_weights, shapes_for
from verl_ckpt_engine.bench.syncing import Case, Syncs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("num_bytes", [20_000_000, 269_000_000, 2_000_000_000])
def test_made_up_weights_have_the_size_that_was_asked_for(num_bytes: int) -> None:
    found = 2 * sum(torch.Size(shape).numel() for shape in shapes_for(num_bytes).values())
    assert 0.96 < found / num_bytes < 1.04


def test_a_table_of_two_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "figures.json"
    arguments = ["--backend", "shm", "--backend", "gloo", "--receivers", "2", "--megabytes", "20", "--rounds", "2"]
    assert main([*arguments, "--bucket-megabytes", "1", "--json", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [["shm", "2", "full"], ["gloo", "2", "full"]]
    rows = json.loads(kept.read_text())
    assert [row["backend"] for row in rows] == ["shm", "gloo"]
    assert all(row["ratio_to_copy"] > 0 and row["spread"][0] <= row["ratio_to_copy"] for row in rows)


def test_what_cannot_be_measured_is_told_and_the_rest_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "naive", "--backend", "shm", "--megabytes", "8", "--rounds", "1"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert "naive to 1: the backend 'naive' moves weights within one process" in err
    assert out.splitlines()[-1].startswith("shm ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--receivers", "1,x"], "a whole number of at least 1 is needed, got 'x'"),
        (["--rounds", "0"], "got '0'"),
        (["--verification", "none"], "invalid choice: 'none'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_memory_beyond_the_weights_is_two_buckets_a_side() -> None:
    bucket = 8 * 1024 * 1024
    case = Case(backend="gloo", num_bytes=60_000_000, bucket_bytes=bucket)
    with Syncs.open(case) as syncs:
        largest = max(
            tensor.numel() * tensor.element_size() for tensor in make_weights(60_000_000, seed=0).held.values()
        )
        timing = syncs.run()
        # A tensor larger than a bucket must lie whole before the engine can have it.
        staged = largest if largest > bucket else 0
        assert timing.sender_extra <= 2 * bucket + 12_000_000
        assert timing.receiver_extra <= 2 * bucket + staged + 12_000_000
