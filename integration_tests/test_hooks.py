"""Every hook in every mode: unset in all its spellings, and named by a class path from outside the project."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import train

STEPS = 2
ROLLOUT = "actor_rollout_ref.rollout"
OUTSIDE = (
    f"{ROLLOUT}.llm_server_manager_class=outside_managers.OutsideServerManager",
    f"{ROLLOUT}.llm_server_manager_options={{label: servers}}",
    f"{ROLLOUT}.checkpoint_manager_class=outside_managers:OutsideCheckpointManager",
    f"{ROLLOUT}.checkpoint_engine.engine_kwargs={{label: weights}}",
    f"{ROLLOUT}.agent.agent_loop_manager_class=outside_managers.OutsideAgentLoopManager",
    f"{ROLLOUT}.agent.agent_loop_manager_options={{label: agents}}",
)


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
@pytest.mark.parametrize("unset", ["null", "{}"])
def test_an_unset_agent_section_means_the_default(mode: str, unset: str, tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        f"trainer.mode={mode}",
        "runtime=local",
        f"trainer.total_training_steps={STEPS}",
        f"{ROLLOUT}.agent={unset}",
        f"{ROLLOUT}.llm_server_manager_class={'null' if unset == 'null' else ''}",
    )
    assert run.code == 0, run.output
    assert run.summary["steps"] == STEPS


@pytest.mark.parametrize(("mode", "runtime"), [("sync", "local"), ("fully_async", "local"), ("fully_async", "ray")])
def test_managers_from_outside_are_seen_at_work(mode: str, runtime: str, tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        f"trainer.mode={mode}",
        f"runtime={runtime}",
        f"trainer.total_training_steps={STEPS}",
        *OUTSIDE,
    )
    assert run.code == 0, run.output
    admits, syncs, groups = (run.events(f"outside.{name}") for name in ("admit", "sync", "group"))
    assert {row["fields"]["label"] for row in admits} == {"servers"}  # type: ignore[index]
    assert [row["fields"]["version"] for row in syncs] == [0, 1, 2]  # type: ignore[index]
    assert {row["fields"]["label"] for row in syncs} == {"weights"}  # type: ignore[index]
    played = {row["fields"]["uid"] for row in groups}  # type: ignore[index]
    trained = {uid for row in run.events("step.begin") for uid in row["fields"]["uids"]}  # type: ignore[index]
    assert trained <= played
    assert {row["fields"]["label"] for row in groups} == {"agents"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ROLLOUT}.llm_server_manager_class=outside_wrong.NoCreate", ("NoCreate", "create")),
        (f"{ROLLOUT}.checkpoint_manager_class=outside_wrong.SyncUpdate", ("SyncUpdate", "update_weights", "async")),
        (f"{ROLLOUT}.agent.agent_loop_manager_class=outside_wrong.WrongKeyword", ("WrongKeyword", "deadline")),
        (f"{ROLLOUT}.agent.agent_loop_manager_class=outside_wrong.not_a_class", ("not_a_class",)),
        (f"{ROLLOUT}.agent.agent_loop_manager_class=no_such_module.Thing", ("no_such_module",)),
        (f"{ROLLOUT}.checkpoint_engine.backend=shmm", ("shmm", "shm")),
        (f"{ROLLOUT}.agent.default_agent_loop=single_tern", ("single_tern", "single_turn")),
    ],
)
def test_a_wrong_plug_in_is_refused_before_anything_starts(
    override: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    run = train(tmp_path / "run", "trainer.total_training_steps=2", override)
    assert run.code == 2, run.output
    key = override.split("=")[0]
    assert key in run.output
    assert all(word in run.output for word in words), run.output
    assert "Traceback" not in run.output
    events = run.folder / "events.jsonl"
    assert not events.exists() or "run.started" not in events.read_text()


def test_data_that_are_refused_late_take_nothing_back(tmp_path: Path) -> None:
    """Before the first step a refused run leaves no folder; after it, what was recorded must stay."""
    run = train(
        tmp_path / "run",
        "runtime=local",
        "trainer.total_training_steps=3",
        "algorithm.adv_estimator=outside_algorithms.LateRefusal",
        "algorithm.norm_adv_by_std_in_grpo=true",
    )
    assert run.code == 1, run.output
    assert "the second batch is refused on purpose" in run.output
    assert "the second batch is refused on purpose" in (run.folder / "error.txt").read_text()
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 1
