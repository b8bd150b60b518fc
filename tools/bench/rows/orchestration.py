"""What a step of 64 toy samples costs beyond bare compute, named by part, on each runtime.

Bare compute is the time in which the engine decodes and the policy worker computes; the rest of a step, from asking for
the batch to serving the new weights, is orchestration. Mode `sync`, so that nothing overlaps and parts add up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from bench.core import BenchError, Row, Target
from bench.processes import run_python
from bench.turns import middle

if TYPE_CHECKING:
    from pathlib import Path

    from bench.core import Benchmark, Conditions

__all__ = ["BENCHMARKS"]

COMPUTE = ("old_log_probs", "reference_log_probs", "forward_backward", "optimizer")
"""Parts of an update that would be there without any orchestration."""
WARM_UP = 10
STEPS_PER_PAIR = 10
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orchestration:
    """Milliseconds a step on one runtime."""

    runtime: str
    target: Target
    baseline: str | None = None

    @property
    def name(self) -> str:
        """Name of the claim."""
        return f"orchestration_{self.runtime}_ms"

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Train once, and take each step after warming up."""
        out = conditions.folder / "run"
        train(self.runtime, WARM_UP + conditions.pairs * STEPS_PER_PAIR, out)
        table = parts(out)
        total = table.pop("total", None)
        if total is None:
            raise BenchError(f"no step of {out} could be taken apart; are bench.busy and sync.phase in events.jsonl?")
        return (
            self._row(self.name, total, target=self.target),
            *(self._row(f"{self.name}/{name}", values) for name, values in table.items()),
        )

    def _row(self, name: str, milliseconds: list[float], *, target: Target | None = None) -> Row:
        figure, spread = middle(milliseconds)
        return Row(
            name=name,
            figure=figure,
            spread=spread,
            count=len(milliseconds),
            unit="ms",
            target=target,
            settings="" if target is None else f"quickstart, mode sync, runtime {self.runtime}, 8 groups of 8; one run",
            leaves_out="decoding, forward, backward and optimizer" if target is not None else "see the claim",
        )


def train(runtime: str, steps: int, out: Path) -> None:
    """Train the quickstart's model with 8 groups of 8."""
    overrides = (
        f"runtime={runtime}",
        "trainer.mode=sync",
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=8",
        "trainer.val_before_train=false",
        "data.val_files=[]",
        "actor_rollout_ref.rollout.llm_server_manager_class=bench.busy_servers.BusyServers",
    )
    run_python(
        ["-m", "verl_trainers.cli", "run", "quickstart", "--out", str(out), "--overwrite", *overrides], limit_s=LIMIT_S
    )


def parts(out: Path) -> dict[str, list[float]]:
    """Return part → milliseconds of each step after warming up. `total` is their sum, without those of compute."""
    busy: dict[int, float] = {}
    phases: dict[int, dict[str, float]] = {}
    for event in lines(out / "events.jsonl"):
        fields = cast("dict[str, float]", event["fields"])
        if event["name"] == "bench.busy":
            busy[int(fields["version"])] = fields["busy_s"]
        elif event["name"] == "sync.phase":
            phases.setdefault(int(fields["version"]), {})[str(fields["phase"])] = fields["seconds"]
    table: dict[str, list[float]] = {}
    for row in lines(out / "metrics.jsonl"):
        step = row.get("step")
        if not isinstance(step, int) or step <= WARM_UP or step not in busy or step - 1 not in busy:
            continue
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        for name, seconds in step_parts(numbers, phases[step], decode=busy[step] - busy[step - 1]).items():
            table.setdefault(name, []).append(1000.0 * seconds)
    return table


def step_parts(numbers: dict[str, float], phases: dict[str, float], *, decode: float) -> dict[str, float]:
    """Return part → seconds of one step."""
    compute = sum(numbers.get(f"seconds/update/{name}", 0.0) for name in COMPUTE)
    costs = {
        "rollout: groups, leases, requests, rewards": numbers["seconds/wait"] - decode,
        "update: fetch": numbers.get("seconds/update/fetch", 0.0),
        "update: prepare": numbers.get("seconds/update/prepare", 0.0),
    }
    named = costs["update: fetch"] + costs["update: prepare"]
    costs["update: call and rest"] = numbers["seconds/update"] - compute - named
    costs |= {f"sync: {phase}": seconds for phase, seconds in phases.items()}
    costs["sync: rest"] = numbers["seconds/sync"] - sum(phases.values())
    return {**costs, "total": sum(costs.values()), "compute: decode": decode, "compute: update": compute}


def lines(path: Path) -> list[dict[str, object]]:
    """Return the rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


BENCHMARKS: tuple[Benchmark, ...] = (
    Orchestration(runtime="local", target=Target(limit=10.0, at_least=False)),
    Orchestration(runtime="ray", target=Target(limit=25.0, at_least=False)),
)
