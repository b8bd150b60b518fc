"""What each of two rank processes runs for `test_worker_ranks`. Imported anew by every child."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from worker_cases import make_batch, make_settings

from verl_contracts.tracking import reduce_metrics
from verl_contracts.training import StepContext
from verl_trainers.config.schema import ActorConfig, FsdpConfig, OptimConfig
from verl_trainers.workers.engine import FsdpEngine
from verl_trainers.workers.ranks import join_ranks
from verl_trainers.workers.source import OnePass

__all__ = ["CASES", "run_case", "run_rank"]

PROPORTIONAL = OptimConfig(lr=1.0, eps=1e3, weight_decay=0.0)
"""Steps in proportion to the gradient: AdamW with an ordinary epsilon turns rounding of tiny gradients into steps."""

CASES = {
    "one micro-batch": ActorConfig(grad_clip=1e9, optim=PROPORTIONAL),
    "everything": ActorConfig(
        grad_clip=0.05,
        ppo_mini_batch_size=2,
        ppo_epochs=2,
        ppo_max_token_len_per_gpu=40,
        old_log_prob="recompute",
        entropy_coeff=0.02,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        loss_agg_mode="seq-mean-token-mean",
        optim=PROPORTIONAL,
    ),
    "a rank with nothing to do": ActorConfig(
        ppo_mini_batch_size=1, ppo_max_token_len_per_gpu=1, grad_clip=1e9, optim=PROPORTIONAL
    ),
    "bfloat16": ActorConfig(fsdp_config=FsdpConfig(model_dtype="bfloat16"), grad_clip=1e9, optim=PROPORTIONAL),
}


def run_case(name: str, path: str, *, rank: int, world_size: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train two steps and return the last step's metrics and the weights."""
    engine = FsdpEngine(make_settings(path, actor=CASES[name], rank=rank, world_size=world_size))
    batch = make_batch(lengths=(1, 20))
    if name == "a rank with nothing to do":  # all but one row of each group have no trained token
        batch = [
            s
            if s.row.sample < 2 - (s.row.uid == "0-1-0")
            else dataclasses.replace(
                s,
                trajectories=(
                    dataclasses.replace(s.trajectories[0], loss_mask=(0,) * len(s.trajectories[0].loss_mask)),
                ),
            )
            for s in batch
        ]
    for step in (1, 2):
        result = engine.update(batch, StepContext(step=step, total_steps=10))
    weights = {meta.name: tensor.clone() for meta, tensor in engine.weights().tensors()}
    return reduce_metrics(result.metrics), weights


def run_rank(rank: int, world_size: int, rendezvous: str, path: str, out: str) -> None:
    """Run every case as one rank; rank 0 writes what came out to the folder `out`."""
    torch.set_num_threads(1)
    join_ranks(rendezvous, rank=rank, world_size=world_size, device="cpu", limit_s=60.0)
    for name in CASES:
        results = run_case(name, path, rank=rank, world_size=world_size)
        torch.save(results, Path(out) / f"{name}-{rank}.pt")
    engine = FsdpEngine(make_settings(path, rank=rank, world_size=world_size))
    broken = OnePass(engine.weights())
    if rank == 0:  # a sender that gives up after one tensor, while the other ranks gather on
        next(broken.tensors())
    broken.finish()
    logs = engine.log_probs(make_batch())
    torch.save(list(logs), Path(out) / f"log_probs-{rank}.pt")
    engine.save(str(Path(out) / "saved"))
    torch.distributed.destroy_process_group()
    # Threads of gloo outlive the group while FSDP's mesh holds it, and one that needs the interpreter while that goes
    # away aborts the process.
    os._exit(0)
