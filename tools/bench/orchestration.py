"""What a step of 64 toy samples costs beyond bare compute, named by part, on each runtime.

Bare compute is the time in which the engine decodes and the policy worker computes; the rest of a step, from asking for
the batch to serving the new weights, is orchestration. Mode `sync`, so that nothing overlaps and parts add up.

    python tools/bench/orchestration.py [--steps N] [--runtime local|ray] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
COMPUTE = ("old_log_probs", "reference_log_probs", "forward_backward", "optimizer")
"""Parts of an update that would be there without any orchestration."""
WARM_UP = 10
LIMIT_S = 600.0


def run(runtime: str, steps: int, out: Path) -> None:
    """Train the quickstart's model with 8 groups of 8."""
    overrides = (
        f"runtime={runtime}",
        "trainer.mode=sync",
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=8",
        "trainer.val_before_train=false",
        "data.val_files=[]",
        "actor_rollout_ref.rollout.llm_server_manager_class=busy_servers.BusyServers",
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "verl_trainers.cli", "run", "quickstart", "--out", str(out), *overrides]
    subprocess.run(command, check=True, env=env, timeout=LIMIT_S, stdout=subprocess.DEVNULL)


def lines(path: Path) -> list[dict[str, object]]:
    """Return the rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def parts(out: Path) -> dict[str, list[float]]:
    """Return part → milliseconds of each step after warming up. `total` is their sum."""
    busy: dict[int, float] = {}
    phases: dict[int, dict[str, float]] = {}
    for event in lines(out / "events.jsonl"):
        fields = event["fields"]
        if event["name"] == "bench.busy":
            busy[fields["version"]] = fields["busy_s"]  # type: ignore[index]
        elif event["name"] == "sync.phase":
            phases.setdefault(fields["version"], {})[fields["phase"]] = fields["seconds"]  # type: ignore[index]
    table: dict[str, list[float]] = {}
    for row in lines(out / "metrics.jsonl"):
        step = row["step"]
        if not isinstance(step, int) or step <= WARM_UP or step not in busy or step - 1 not in busy:
            continue
        number = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        compute = sum(number.get(f"seconds/update/{name}", 0.0) for name in COMPUTE)
        decode = busy[step] - busy[step - 1]
        costs = {
            "rollout: groups, leases, requests, rewards": number["seconds/wait"] - decode,
            "update: fetch": number.get("seconds/update/fetch", 0.0),
            "update: prepare": number.get("seconds/update/prepare", 0.0),
        }
        costs["update: call and rest"] = (
            number["seconds/update"] - compute - sum(costs[name] for name in ("update: fetch", "update: prepare"))
        )
        costs |= {f"sync: {phase}": seconds for phase, seconds in phases[step].items()}
        costs["sync: rest"] = number["seconds/sync"] - sum(phases[step].values())
        costs["total"] = sum(costs.values())
        costs["compute: decode"] = decode
        costs["compute: update"] = compute
        for name, seconds in costs.items():
            table.setdefault(name, []).append(1000.0 * seconds)
    return table


def main() -> int:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runtime", choices=("local", "ray"), action="append")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "orchestration.json")
    options = parser.parse_args()
    rows = []
    for runtime in options.runtime or ("local", "ray"):
        with tempfile.TemporaryDirectory() as folder:
            run(runtime, options.steps, Path(folder) / "run")
            table = parts(Path(folder) / "run")
        print(f"\n{runtime}: median (quartiles) of {len(table['total'])} steps, ms")
        for name, values in table.items():
            low, median, high = statistics.quantiles(values, n=4)
            print(f"  {name:45} {median:8.2f}  ({low:.2f} … {high:.2f})")
            rows.append(
                {
                    "name": f"orchestration_ms/{runtime}/{name}",
                    "value": round(median, 3),
                    "spread": [round(low, 3), round(high, 3)],
                }
            )
    report = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
