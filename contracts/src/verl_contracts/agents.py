"""Agent loops: from a prompt to trajectories, in the same shape in every trainer mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_contracts.clock import Deadline
    from verl_contracts.events import EventSink
    from verl_contracts.runtime import ObjectSpec, Runtime
    from verl_contracts.samples import GroupRequest, GroupResult, Trajectory

__all__ = ["AgentLoop", "AgentLoopManager", "AgentSettings"]


class AgentLoop(Protocol):
    """One episode: turns with the model, tools and environment. Called as ``Class(client=LLMClient, **options)``.

    One object serves many episodes at once, so it keeps no state of any of them.
    """

    async def run(self, request: GroupRequest, sample: int, /, *, deadline: Deadline) -> tuple[Trajectory, ...]:
        """Play sample number `sample` of `request`.

        Returns one trajectory, or several when the context was restarted. Returns none when a turn came back aborted.
        Raises whatever went wrong; the manager turns it into a failed sample.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What every agent-loop manager is told."""

    num_workers: int = 1
    """Worker processes."""
    loop: str = "single_turn"
    """Name or class path of the `AgentLoop`."""
    loop_options: Mapping[str, object] = field(default_factory=dict)
    sample_limit_s: float = 300.0
    """Longest that one sample may take, its reward included; then it is timed out."""
    model_path: str = ""
    """Folder with the tokenizer, for loops that need text; empty when there is none."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments for the implementation's `Config`."""


class AgentLoopManager(Protocol):
    """Plays groups. The one plug-in point for agents. The driver owns backpressure and cancellation.

    `create` → `run_group` any number at once → `close`.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the implementation's own options."""

    @classmethod
    async def create(
        cls,
        settings: AgentSettings,
        /,
        *,
        runtime: Runtime,
        client: ObjectSpec,
        reward: ObjectSpec | None,
        events: EventSink,
        deadline: Deadline,
    ) -> Self:
        """Start the workers. `client` builds an `LLMClient`, `reward` a `RewardClient`, where they are needed.

        A `reward` of None means that groups come back unscored.
        """
        ...

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        """Play all n samples and return n results, whatever happened to each. Cancelling stops them.

        Raises only for the infrastructure: `ActorFailed`, `WaitTimeout`, `NoHealthyReplica`.
        """
        ...

    async def close(self, *, deadline: Deadline) -> None:
        """Stop the workers. Idempotent."""
        ...
