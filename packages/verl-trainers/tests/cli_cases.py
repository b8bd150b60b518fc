"""Stand-ins that a configuration can name, so that the command is tested where no other package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_contracts.samples import GroupRequest, Trajectory

if TYPE_CHECKING:
    from verl_contracts.agents import AgentLoop
    from verl_contracts.clock import Deadline
    from verl_contracts.rollout import LLMClient

ROLLOUT = "actor_rollout_ref.rollout"
STANDINS = (
    "runtime=verl_contracts.testing.inprocess:InProcessRuntime",
    "trainer.device=cpu",
    "trainer.mode=sync",
    "async_training=null",
    f"{ROLLOUT}.llm_server_manager_class=fakes:FakeServers",
    f"{ROLLOUT}.checkpoint_manager_class=fakes:FakeCheckpoint",
    f"{ROLLOUT}.checkpoint_engine.backend=verl_contracts.testing.memory:MemoryBackend",
    f"{ROLLOUT}.agent.agent_loop_manager_class=fakes:FakeAgents",
    f"{ROLLOUT}.agent.default_agent_loop=cli_cases:SilentLoop",
)


class SilentLoop:
    """Plays no turn."""

    def __init__(self, *, client: LLMClient) -> None:
        self._client = client

    async def run(self, request: GroupRequest, sample: int, /, *, deadline: Deadline) -> tuple[Trajectory, ...]:
        return ()


def failing(folder: Path) -> None:
    """Fail as a preparation would: with a cause, and what it led to."""
    try:
        raise OSError(f"disk full while writing {folder.name}")
    except OSError as exc:
        raise RuntimeError("no data could be made") from exc


def interrupted(folder: Path) -> None:
    """Get a Ctrl-C."""
    raise KeyboardInterrupt


if TYPE_CHECKING:

    def _is_loop(x: SilentLoop) -> AgentLoop:
        return x
