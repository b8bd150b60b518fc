"""Saved groups in place of replicas and agents: the same loop admits them, and gets back what was saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError, DataError
from verl_contracts.samples import GroupResult, Prompt, Trajectory
from verl_trainers.config.steps import StepCount
from verl_trainers.partial.rollout_file import head_of, limits_of, read_rollouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_contracts.clock import Deadline
    from verl_contracts.events import JsonValue
    from verl_contracts.samples import GroupRequest
    from verl_contracts.training import DataSource
    from verl_trainers.config.schema import RunConfig
    from verl_trainers.core.producer import GroupPlayer

__all__ = ["SavedGroups", "count_saved_steps"]


class SavedGroups:
    """Both ends of the loop: the prompts of the groups in the order in which they were saved, and the groups."""

    def __init__(self, groups: Sequence[GroupResult]) -> None:
        """Serve `groups`. Raises `DataError` when one prompt occurs twice in an epoch."""
        self._groups = {(group.uid.epoch, group.uid.row): group for group in groups}
        if len(self._groups) < len(groups):
            raise DataError(
                f"data.rollout_files: {len(groups)} groups of {len(self._groups)} prompts: a file is named twice, or "
                "files of runs with the same data.seed are mixed"
            )
        self._order = list(self._groups)
        self._next = 0

    @classmethod
    def open(cls, config: RunConfig) -> SavedGroups:
        """Read all files. Raises `DataError` for the first that cannot be trained on."""
        head, limits = head_of(config), limits_of(config)
        return cls(
            [group for file in config.data.rollout_files for group in read_rollouts(file, head=head, limits=limits)]
        )

    @property
    def num_rows(self) -> int:
        """Groups there are."""
        return len(self._groups)

    def next(self) -> Prompt | None:
        """Return the next group's prompt; None when all were returned."""
        if self._next == len(self._order):
            return None
        epoch, row = self._order[self._next]
        self._next += 1
        return Prompt(epoch=epoch, row=row, prompt_ids=_prompt_ids(self._groups[epoch, row]))

    async def run_group(self, request: GroupRequest, /, *, deadline: Deadline) -> GroupResult:
        """Return what was saved."""
        saved = self._groups[request.uid.epoch, request.uid.row]
        return GroupResult(uid=request.uid, samples=saved.samples)

    def state(self) -> Mapping[str, JsonValue]:
        """Return the cursor."""
        return {"position": self._next, "groups": len(self._order)}

    def restore(self, state: Mapping[str, JsonValue], /) -> None:
        """Go on from `state`. Raises `DataError` when it belongs to other data."""
        position = state.get("position")
        if state.get("groups") != len(self._order) or not isinstance(position, int):
            raise DataError(
                f"the saved cursor {dict(state)} belongs to other files: {len(self._order)} groups are here"
            )
        self._next = position


def count_saved_steps(config: RunConfig, num_groups: int, *, max_staleness: int) -> StepCount:
    """Return how many steps the saved groups make. Raises `ConfigError` when that is none, or the last is too stale."""
    batch, asked = config.data.train_batch_size, config.trainer.total_training_steps
    full, tail = divmod(num_groups, batch)
    steps = full if asked is None else asked
    if not 1 <= steps <= full:
        raise ConfigError(
            f"data.rollout_files: {num_groups} groups // data.train_batch_size = {num_groups} // {batch} = {full} "
            f"steps, and trainer.total_training_steps is {asked}"
        )
    if steps - 1 > max_staleness:
        raise ConfigError(
            f"data.rollout_files: all samples are of version 0, so step {steps} would train at staleness "
            f"{steps} - 1 - 0 = {steps - 1}, and trainer.mode={config.trainer.mode} has the bound {max_staleness}; set "
            f"trainer.total_training_steps={max_staleness + 1}, or trainer.mode=fully_async with "
            f"async_training.max_staleness={steps - 1}"
        )
    left = num_groups - steps * batch
    message = f"{steps} steps of {batch} saved groups" + (f"; {left} groups are left out" if left else "")
    return StepCount(steps=steps, epochs=1, tail=tail, message=message)


def _prompt_ids(group: GroupResult) -> tuple[int, ...]:
    for sample in group.scored:
        value = sample.payload.value if sample.payload is not None else ()
        for part in value if isinstance(value, tuple) else ():
            if isinstance(part, Trajectory):
                return part.ids[: part.prompt_length]
    return ()


if TYPE_CHECKING:

    def _is_data_source(x: SavedGroups) -> DataSource:
        return x

    def _is_group_player(x: SavedGroups) -> GroupPlayer:
        return x
