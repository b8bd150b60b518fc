"""How much memory there is, and whether the roles of a run fit into it.

On GPUs each is judged by itself; on CPU all processes share the machine. What certainly does not fit is refused; what
might not, when micro-batches and sequences are full, is a warning, since a bound that is too high must stop nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_trainers.config.mistakes import Mistake
from verl_trainers.config.placing import run_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.training import ModePlan
    from verl_trainers.config.schema import RunConfig
    from verl_trainers.preflight.memory import RoleMemory

__all__ = ["Verdict", "judge_memory", "memory_here"]

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether memory suffices."""

    lines: tuple[str, ...]
    mistakes: tuple[Mistake, ...] = ()
    warnings: tuple[str, ...] = ()


def memory_here(config: RunConfig) -> tuple[int, str] | None:
    """Return the bytes of one device, or of the machine on CPU, and who says so; None when nobody does."""
    stated = config.trainer.device_memory_gb
    if stated is not None:
        return int(stated * _GIB), "trainer.device_memory_gb"
    if config.runtime_options.get("address") is not None:
        return None
    if run_device(config) == "cuda":
        import torch

        if not torch.cuda.is_available():
            return None
        sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        return min(sizes), "the smallest GPU here"
    return _machine_memory()


def judge_memory(config: RunConfig, plan: ModePlan, roles: Sequence[RoleMemory]) -> Verdict:
    """Compare what `roles` need with what there is."""
    lines = [_role_line(role) for role in roles]
    here = memory_here(config)
    policy, replica = roles
    if config.trainer.device_memory_gb is None and run_device(config) == "cpu":
        where, certain, most = "this machine", _all(roles, certain=True), _all(roles, certain=False)
    elif plan.placement.hybrid:
        where, certain, most = "each device", *_together(policy, replica, plan.schedule.sleep_while_training)
    else:
        where, certain, most = "the fullest device", max(r.certain for r in roles), max(r.most for r in roles)
    needs = f"{where} needs {gib(certain)}, and up to {gib(most)} with full micro-batches and sequences"
    if here is None:
        return Verdict(lines=(*lines, f"{needs}; how much it has is not known here (trainer.device_memory_gb says it)"))
    has = f"{gib(here[0])} ({here[1]})"
    lines.append(f"{needs}; it has {has}")
    if certain > here[0]:
        advice = (
            "shard the model over more devices by trainer.n_gpus_per_node, choose a smaller one, or say how much there "
            "is by trainer.device_memory_gb"
        )
        text = f"does not fit: {where} needs {gib(certain)} at least and has {has}; {advice}"
        return Verdict(lines=tuple(lines), mistakes=(Mistake(key="actor_rollout_ref.model.path", text=text),))
    if most > here[0]:
        text = (
            f"memory may run out: {where} needs up to {gib(most)} and has {has}; lower "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu or actor_rollout_ref.rollout.max_num_seqs"
        )
        return Verdict(lines=tuple(lines), warnings=(text,))
    return Verdict(lines=tuple(lines))


def gib(num_bytes: int) -> str:
    """Return a size for people, of three digits."""
    for unit, size in (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


def _role_line(role: RoleMemory) -> str:
    parts = ", ".join(f"{part.name} {'' if part.certain else '≤ '}{gib(part.num_bytes)}" for part in role.parts)
    return f"{role.processes} x {role.role}: {parts}"


def _all(roles: Sequence[RoleMemory], *, certain: bool) -> int:
    return sum(role.processes * (role.certain if certain else role.most) for role in roles)


def _together(policy: RoleMemory, replica: RoleMemory, sleeps: bool) -> tuple[int, int]:
    """Return what a device needs that both share. A replica that sleeps leaves room for activations."""
    most = policy.certain + replica.most
    if sleeps:
        return policy.certain + replica.certain, max(policy.most, most)
    return policy.certain + replica.certain, policy.most + replica.most


def _machine_memory() -> tuple[int, str] | None:
    """Return what the kernel says, or the limit of our control group where that is lower."""
    try:
        words = Path("/proc/meminfo").read_text(encoding="ascii").split()
        total, source = int(words[words.index("MemTotal:") + 1]) * 1024, "all of this machine"
    except (OSError, ValueError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if limit < total:
            total, source = limit, "the limit of this container"
    return total, source
