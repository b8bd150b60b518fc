"""Weights on their way out: names, wire type, ties, passes that end early, and saved folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from worker_cases import make_batch, make_model, make_settings

from verl_contracts.errors import StateError
from verl_contracts.training import StepContext
from verl_trainers.config.schema import ActorConfig, FsdpConfig
from verl_trainers.workers.engine import FsdpEngine
from verl_trainers.workers.source import OnePass


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _sent(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {meta.name: tensor.clone() for meta, tensor in engine.weights().tensors()}


def _train(engine: FsdpEngine, steps: int = 1) -> None:
    for step in range(1, steps + 1):
        engine.update(make_batch(), StepContext(step=step, total_steps=10))


@pytest.mark.parametrize("tie", [True, False])
def test_stream_is_the_checkpoint_with_ties_once(tmp_path: Path, tie: bool) -> None:
    path = make_model(tmp_path / "model", tie=tie)
    sent = _sent(FsdpEngine(make_settings(path)))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert ("lm_head.weight" in sent) is not tie
    assert set(plain) - set(sent) == ({"lm_head.weight"} if tie else set())
    assert all(torch.equal(plain[name], tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_manifest_tells_what_comes(tmp_path: Path, dtype: str) -> None:
    settings = make_settings(make_model(tmp_path / "model"))
    engine = FsdpEngine(dataclasses.replace(settings, wire_dtype=dtype))  # type: ignore[arg-type]
    manifest = engine.weights().manifest(4)
    items = [(meta, tensor.dtype, tuple(tensor.shape), tensor.nbytes) for meta, tensor in engine.weights().tensors()]
    assert manifest.version == 4
    assert manifest.tensors == tuple(meta for meta, *_ in items)
    assert all(str(kind) == f"torch.{meta.dtype}" == f"torch.{dtype}" for meta, kind, *_ in items)
    assert all(shape == meta.shape for meta, _, shape, _ in items)
    assert manifest.num_bytes == sum(num_bytes for *_, num_bytes in items)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_every_tensor_changes_with_an_update(tmp_path: Path, compute: str) -> None:
    actor = ActorConfig(fsdp_config=FsdpConfig(model_dtype=compute))  # type: ignore[arg-type]
    engine = FsdpEngine(make_settings(make_model(tmp_path / "model"), actor=actor))
    source = engine.weights()
    before = {meta.name: tensor.clone() for meta, tensor in source.tensors()}
    _train(engine)
    after = {meta.name: tensor.clone() for meta, tensor in source.tensors()}
    assert [name for name, tensor in after.items() if torch.equal(before[name], tensor)] == []


def test_pass_that_ends_early_can_be_finished(tmp_path: Path) -> None:
    engine = FsdpEngine(make_settings(make_model(tmp_path / "model")))
    total = len(engine.weights().manifest(0).tensors)
    seen: list[str] = []

    class Counting:
        def __init__(self) -> None:
            self.manifest = engine.weights().manifest

        def tensors(self):  # type: ignore[no-untyped-def]
            for meta, tensor in engine.weights().tensors():
                seen.append(meta.name)
                yield meta, tensor

    once = OnePass(Counting())
    taken = once.tensors()
    next(taken)
    next(taken)
    taken.close()  # type: ignore[attr-defined]
    assert len(seen) == 2
    with pytest.raises(StateError, match="once only"):
        next(once.tensors())
    once.finish()
    once.finish()
    assert len(seen) == total


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_saved_folder_gives_the_same_logits_in_plain_transformers(tmp_path: Path, compute: str, tie: bool) -> None:
    origin = Path(make_model(tmp_path / "model", tie=tie))
    (origin / "tokenizer.json").write_text("{}")
    actor = ActorConfig(fsdp_config=FsdpConfig(model_dtype=compute))  # type: ignore[arg-type]
    engine = FsdpEngine(make_settings(str(origin), actor=actor))
    _train(engine, steps=2)
    target = tmp_path / "runs" / "saved"
    engine.save(str(target))
    assert (target / "tokenizer.json").read_text() == "{}"
    plain = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert plain.dtype == getattr(torch, compute)
    batch = make_batch()
    for sample, mine in zip(batch, engine.log_probs(batch), strict=True):
        ids = torch.tensor([sample.trajectories[0].ids])
        with torch.no_grad():
            rows = torch.log_softmax(plain(ids).logits[0, :-1].float(), dim=-1)
        want = rows.gather(1, ids[0, 1:, None])[:, 0]
        assert torch.allclose(mine[1:], want, atol=1e-6 if compute == "float32" else 0.05, rtol=0.0)


def test_saving_again_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    engine = FsdpEngine(make_settings(make_model(tmp_path / "model")))
    target = tmp_path / "saved"
    target.mkdir()
    (target / "old.txt").write_text("old")
    engine.save(str(target))
    assert not (target / "old.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "saved"]


def test_saving_that_fails_leaves_the_old_folder(tmp_path: Path) -> None:
    origin = Path(make_model(tmp_path / "model"))
    engine = FsdpEngine(make_settings(str(origin)))
    target = tmp_path / "saved"
    engine.save(str(target))
    before = sorted(path.name for path in target.iterdir())
    origin.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        engine.save(str(target))
    assert sorted(path.name for path in target.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "saved"]
