"""Two ranks over gloo give what one rank gives: gradients, weights, log-probs, saved folders."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from worker_cases import make_batch, make_model, make_settings
from worker_ranks import CASES, run_case, run_rank

from verl_trainers.workers.engine import FsdpEngine
from verl_trainers.workers.ranks import open_rendezvous

pytestmark = pytest.mark.timeout(300)  # two processes import torch on a machine that may be busy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two_ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases on two ranks, and return the folder with what came out."""
    out = tmp_path_factory.mktemp("out")
    store = open_rendezvous(2, limit_s=60.0)
    spawn = multiprocessing.get_context("spawn")
    arguments = (f"{store.host}:{store.port}", model, str(out))
    ranks = [spawn.Process(target=run_rank, args=(rank, 2, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120.0)
    try:
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return out


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return float(torch.cat([(left[n] - right[n]).flatten() for n in left]).double().norm())


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_step_like_one(two_ranks: Path, model: str, name: str) -> None:
    start = {m.name: t.clone() for m, t in FsdpEngine(make_settings(model)).weights().tensors()}
    metrics, weights = run_case(name, model, rank=0, world_size=1)
    got: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = [
        torch.load(two_ranks / f"{name}-{rank}.pt") for rank in range(2)
    ]
    assert got[0][0] == got[1][0]
    assert _distance(got[0][1], got[1][1]) == 0.0
    assert got[0][0].keys() == metrics.keys()
    limit = 2e-2 if name == "bfloat16" else 1e-5
    for key, value in metrics.items():
        assert got[0][0][key] == pytest.approx(value, rel=limit, abs=1e-6), key
    moved = _distance(weights, start)
    assert moved > 1e-6
    assert _distance(got[0][1], weights) / moved < limit


def test_pass_that_a_rank_left_half_way_does_not_block_the_others(two_ranks: Path, model: str) -> None:
    """The ranks compute log-probs after that pass, together; here they are compared with one rank's."""
    want = FsdpEngine(make_settings(model)).log_probs(make_batch())
    for rank in range(2):
        got = torch.load(two_ranks / f"log_probs-{rank}.pt")
        assert all(torch.allclose(a, b, atol=1e-6, rtol=0.0) for a, b in zip(got, want, strict=True))


def test_two_ranks_save_what_plain_transformers_loads(two_ranks: Path, model: str) -> None:
    saved = AutoModelForCausalLM.from_pretrained(two_ranks / "saved").state_dict()
    plain = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.items())
