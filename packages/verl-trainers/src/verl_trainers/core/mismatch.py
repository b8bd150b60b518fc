"""Whether replicas and trainer compute the same log-probs from the same weights.

Owns one line of the log, whatever the length of a run. It prevents a run whose ratios are wrong from the first step,
since weights did not arrive or log-probs are of another kind, from looking like one that is slow to learn.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MismatchWatch"]

_log = logging.getLogger(__name__)
_DIFF = "rollout/logprob_diff_same_version"


class MismatchWatch:
    """Says at the first step above the limit how far apart log-probs are, and is silent from then on.

    Looks at tokens of the version that is trained only: those of older ones differ since the policy has changed.
    """

    def __init__(self, *, limit: float) -> None:
        """Differences up to `limit`, in nats a token, are numerics."""
        self._limit = limit
        self.said = False
        """Whether a step was above it."""

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at what the policy workers measured in a step."""
        diff = metrics.get(_DIFF)
        if self.said or diff is None or diff <= self._limit:
            return
        self.said = True
        _log.warning(
            "step %d: log-probs of the replicas and of the trainer differ by %.3g nats a token on average at equal "
            "weights (%s; actor_rollout_ref.rollout.logprob_diff_limit is %g): do both compute in one dtype "
            "(actor_rollout_ref.rollout.dtype, actor_rollout_ref.actor.fsdp_config.model_dtype)? Did weights arrive "
            "(events.jsonl shows the syncs)? Are the engine's log-probs those of the whole vocabulary, at the "
            "temperature that was sampled at? This is said once",
            step,
            diff,
            _DIFF,
            self._limit,
        )
