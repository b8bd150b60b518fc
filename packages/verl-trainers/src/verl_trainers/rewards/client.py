"""The reward client that agent-loop workers build, and how a configuration describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.runtime import ObjectSpec
from verl_contracts.waits import bounded
from verl_trainers.config.plugins import reward_function, reward_key
from verl_trainers.rewards.decode import load_decoder
from verl_trainers.rewards.pool import RewardPool
from verl_trainers.rewards.wire import Setup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.clock import Deadline
    from verl_contracts.rewards import RewardClient, RewardRequest, RewardResult
    from verl_contracts.runtime import ActorContext
    from verl_trainers.config.schema import RunConfig

__all__ = ["ProcessRewardClient", "reward_spec"]


class ProcessRewardClient:
    """Judges in child processes of the process that it lives in. They start with the first request."""

    def __init__(
        self,
        *,
        context: ActorContext,
        function: str,
        options: Mapping[str, object],
        key: str,
        tokenizer_path: str,
        limit_s: float,
        num_processes: int,
        trust_remote_code: bool = False,
        start_limit_s: float = 60.0,
    ) -> None:
        """Start nothing yet. `function` is a name or class path, and `key` the config key that named it."""
        self._clock = context.clock
        self._setup = Setup(
            function=function, options=dict(options), key=key, limit_s=limit_s, start_limit_s=start_limit_s
        )
        self._num_processes = num_processes
        self._decode = load_decoder(tokenizer_path, trust_remote_code=trust_remote_code)
        self._pool: RewardPool | None = None

    async def score(self, request: RewardRequest, /, *, deadline: Deadline) -> RewardResult:
        """Judge. Raises `RewardError` when the function cannot be loaded, `WaitTimeout` at the deadline."""
        pool = self._pool
        if pool is None:
            pool = self._pool = RewardPool(self._setup, num_processes=self._num_processes)
        return await bounded(
            pool.submit(request, self._decode(request.response_ids)),
            subject=f"reward of {request.uid}, sample {request.sample}",
            holder=lambda: f"reward processes {', '.join(map(str, pool.pids))}",
            deadline=deadline,
            clock=self._clock,
        )

    async def close(self) -> None:
        """Stop the reward processes and everything that they forked. Idempotent."""
        if self._pool is not None:
            await self._pool.close()


def reward_spec(config: RunConfig) -> ObjectSpec | None:
    """Return how to build the client that `config` asks for; None when it names no reward."""
    named = reward_function(config)
    if named is None:
        return None
    function, options = named
    return ObjectSpec(
        path=f"{ProcessRewardClient.__module__}:{ProcessRewardClient.__qualname__}",
        arguments={
            "function": function,
            "options": dict(options),
            "key": reward_key(config),
            "tokenizer_path": config.actor_rollout_ref.model.path,
            "limit_s": config.reward.limit_s,
            "num_processes": config.reward.num_processes,
            "trust_remote_code": config.actor_rollout_ref.model.trust_remote_code,
            "start_limit_s": config.reward.start_limit_s,
        },
    )


if TYPE_CHECKING:

    def _is_reward_client(x: ProcessRewardClient) -> RewardClient:
        return x
