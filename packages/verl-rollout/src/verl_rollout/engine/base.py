"""The face of one inference engine inside its process. Replicas host an engine; nobody else talks to it.

It is asyncio outside and computes elsewhere, on a thread or in processes of its own, so that the loop that answers
`status` is never blocked. The Protocol exists so that a replica knows no engine, nor where an engine's weights lie: the
embedded one and vLLM are chosen by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import Capability, PauseMode, ReplicaStatus, RolloutSettings
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import WeightReceiverHost

__all__ = ["Engine", "NoOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """`Config` of an engine that has no options of its own."""


class Engine(Protocol):
    """One model and its KV cache.

    `create` → (`pause` → a sync through `receiver_host` → `resume`) before the first `generate`, and again at each
    weight sync → `close`.

    Concurrency: coroutines of one engine belong to one event loop and may run at once. An engine that crashed is dead:
    it fails everything that runs, and every later call but `status` and `close`, with the first error.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the engine's own options, built from `RolloutSettings.engine_options`."""

    @classmethod
    def create(cls, settings: RolloutSettings, /, *, replica_id: str, rank: int, clock: Clock) -> Self:
        """Build the model, without weights, and the cache. Blocking; raises `ConfigError`. `rank` counts replicas."""
        ...

    async def generate(self, request: GenerationRequest, /, *, deadline: Deadline) -> Completion | AbortedCompletion:
        """Generate one sequence. Cancelling stops it.

        Raises `StateError` while there are no committed weights, or only ones older than the request's `min_version`;
        `DataError` for a request that can never be served; `WaitTimeout` at the deadline.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None, /, *, reason: str) -> None:
        """Cut these requests, or all when None; they return `AbortedCompletion`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode, /, *, deadline: Deadline) -> None:
        """Return once nothing is decoded. Requests that arrive later wait. Idempotent."""
        ...

    async def resume(self) -> None:
        """Decode again. Idempotent. Raises `StateError` when asleep; an invalid engine stays silent."""
        ...

    def status(self) -> ReplicaStatus:
        """Return the present status, at once."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do beyond the rest: `sleep` and `wake` with `SLEEP`, pausing with `keep` with `KEEP`."""
        ...

    @property
    def receiver_host(self) -> WeightReceiverHost:
        """The receivers of all its ranks, wherever these are. `transfer` wants it paused and awake, else `StateError`.

        From the start of a transfer until its commit the weights are invalid. A commit with `keep_cache` lets frozen
        sequences go on over their old cache; otherwise that is computed again.
        """
        ...

    async def sleep(self) -> None:
        """Free weights and cache. Only a paused engine may; it holds no version afterwards. Idempotent."""
        ...

    async def wake(self) -> None:
        """Allocate again: invalid, and paused until `resume`. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop everything that it started; requests in flight fail. Idempotent."""
        ...
