"""What one waits for before anything happens: the command's help, and imports."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.core import Row, Target
from bench.processes import run_python
from bench.turns import middle, take_turns

if TYPE_CHECKING:
    from bench.core import Benchmark, Conditions

__all__ = ["BENCHMARKS"]

STARTS_PER_PAIR = 4
LIMIT_S = 60.0
HEAVY = ("torch", "transformers", "ray", "vllm", "omegaconf")
CONTRACTS = ("agents", "clock", "plugins.loading", "rewards", "rollout", "runtime", "samples", "tracking", "training")
ROLLOUT = ("verl_rollout.manager", "verl_rollout.balancer", "verl_rollout.client", "verl_rollout.agents.manager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Milliseconds that a new process takes to run `code`, beside one that does nothing."""

    name: str
    code: str
    target: Target
    over_python: bool
    """Whether the start of Python itself is taken off."""
    what: str
    baseline: str | None = None

    def measure(self, conditions: Conditions, /) -> tuple[Row, ...]:
        """Start processes in turns; the first round only warms the disk's cache and the compiled modules."""
        sides = {"code": partial(_start_ms, self.code), "pass": partial(_start_ms, "pass")}
        take_turns(sides, rounds=1)
        found = take_turns(sides, rounds=conditions.pairs * STARTS_PER_PAIR)
        bare = found["pass"] if self.over_python else [0.0] * len(found["code"])
        values = [whole - empty for whole, empty in zip(found["code"], bare, strict=True)]
        figure, spread = middle(values)
        python, python_spread = middle(found["pass"])
        claim = Row(
            name=self.name,
            figure=figure,
            spread=spread,
            count=len(values),
            unit="ms",
            target=self.target,
            settings=f"{self.what}; wall time in a new process, files cached"
            + (", minus that of `python -c pass` in the same pair" if self.over_python else ""),
            leaves_out="the first start on a machine, which reads from disk and compiles",
        )
        bare_row = Row(
            name=f"{self.name}/python",
            figure=python,
            spread=python_spread,
            count=len(values),
            unit="ms",
            settings="`python -c pass` in the same turns",
            leaves_out="nothing",
        )
        return claim, bare_row


def _start_ms(code: str) -> float:
    begun = time.perf_counter()
    run_python(["-c", code], limit_s=LIMIT_S)
    return 1000.0 * (time.perf_counter() - begun)


def _importing(*modules: str) -> str:
    """Return code that imports `modules` and fails when something heavy came along."""
    return f"import sys, {', '.join(modules)}; sys.exit(' '.join({set(HEAVY)!r} & set(sys.modules)) or 0)"


BENCHMARKS: tuple[Benchmark, ...] = (
    Start(
        name="cli_help_ms",
        code="from verl_trainers.cli import main; main(['--help'])",
        target=Target(limit=500.0, at_least=False),
        over_python=False,
        what="`verl-train --help`",
    ),
    Start(
        name="import_contracts_ms",
        code=_importing(*(f"verl_contracts.{name}" for name in CONTRACTS)),
        target=Target(limit=60.0, at_least=False),
        over_python=True,
        what=f"importing {len(CONTRACTS)} families of contracts and the plug-in loader",
    ),
    Start(
        name="import_rollout_ms",
        code=_importing(*ROLLOUT),
        target=Target(limit=300.0, at_least=False),
        over_python=True,
        what="importing the managers, the balancer and the client of verl-rollout, with torch not among the modules",
    ),
)
