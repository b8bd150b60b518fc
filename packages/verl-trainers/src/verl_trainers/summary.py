"""The few numbers that say how a run went, as they are written to ``summary.json``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.events import JsonValue
    from verl_trainers.core.loop import LoopReport
    from verl_trainers.partial.rules import Part

__all__ = ["summarize"]


def summarize(report: LoopReport, *, part: Part, mode: str, runtime: str, wall_s: float) -> dict[str, JsonValue]:
    """Return the summary. `reward_first` and `reward_last` are means over the first and last tenth of the steps.

    A run that only generates counts its groups as saved: it trains none, and its weights stay version 0.
    """
    saves = part == "rollout_only"
    tenth = math.ceil(len(report.rewards) / 10)
    validations = [row.score for row in report.validations]
    return {
        "part": part,
        "mode": mode,
        "runtime": runtime,
        "steps": report.steps,
        "updates": report.updates,
        "steps_without_signal": report.steps_without_signal,
        "groups_trained": 0 if saves else report.groups_trained,
        "groups_saved": report.groups_trained if saves else 0,
        "groups_dropped": report.groups_dropped,
        "rejects": [{"uid": str(row.uid), "reason": row.reason} for row in report.rejects[-20:]],
        "reward_first": _mean(report.rewards[:tenth]),
        "reward_last": _mean(report.rewards[-tenth:] if tenth else ()),
        "val_first": validations[0] if validations else None,
        "val_last": validations[-1] if validations else None,
        "val_versions": [row.version for row in report.validations],
        "samples_per_s": report.rows_trained / report.train_seconds if report.train_seconds > 0 else None,
        "max_staleness_seen": 0 if saves else report.max_staleness_seen,
        "final_version": 0 if saves else report.final_version,
        "logprob_diff_mean": _mean(report.logprob_diffs),
        "logprob_diff_max": max(report.logprob_diffs, default=None),
        "train_s": report.train_seconds,
        "wall_s": wall_s,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
