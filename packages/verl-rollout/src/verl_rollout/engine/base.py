"""The face of one inference engine inside its process. Replicas host an engine; nobody else talks to it.

It is asyncio outside and computes on a thread of its own, so that the loop that answers `status` is never blocked. The
Protocol exists so that a replica knows no engine: the embedded one and vLLM are chosen by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.clock import Clock, Deadline
    from verl_contracts.rollout import PauseMode, ReplicaStatus, RolloutSettings
    from verl_contracts.tokens import AbortedCompletion, Completion, GenerationRequest
    from verl_contracts.weights import Manifest, WeightTarget

__all__ = ["Engine"]


class Engine(Protocol):
    """One model and its KV cache.

    `create` → (`pause` → `begin_update` → `target().load` → `commit` → `resume`) before the first `generate`, and again
    at each weight sync → `close`.

    Concurrency: coroutines of one engine belong to one event loop and may run at once. `status` and `begin_update` may
    be called from any thread; so may the target, while the engine is paused. An engine whose thread crashed is dead: it
    fails everything that runs, and every later call but `status` and `close`, with the first error.
    """

    @classmethod
    def create(cls, settings: RolloutSettings, /, *, replica_id: str, clock: Clock) -> Self:
        """Build the model, without weights, and the cache. Blocking; raises `ConfigError`."""
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

    def target(self) -> WeightTarget:
        """Return what a receiver fills: it writes into the live model. Only between `begin_update` and `commit`."""
        ...

    def check_manifest(self, manifest: Manifest, /) -> None:
        """Raise `WeightSyncError` unless these tensors fill the model: before a sync touches anything. Any time."""
        ...

    def begin_update(self) -> None:
        """Declare the weights invalid, until `commit`. Raises `StateError` unless paused and awake."""
        ...

    async def commit(self, version: int, /, *, keep_cache: bool) -> None:
        """Declare the loaded weights to be `version`. Frozen sequences go on over their old cache if `keep_cache`.

        Otherwise their cache is computed again. Raises `StateError` unless an update was begun and fully loaded.
        """
        ...

    async def sleep(self) -> None:
        """Free weights and cache. Only a paused engine may; it holds no version afterwards. Idempotent."""
        ...

    async def wake(self) -> None:
        """Allocate again: invalid, and paused until `resume`. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop the thread; requests in flight fail. Idempotent."""
        ...
