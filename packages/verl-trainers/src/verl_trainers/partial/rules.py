"""Which part of a run is asked for, and what cannot be asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from verl_trainers.config.mistakes import Mistake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_trainers.config.schema import RunConfig

__all__ = ["READ_TRAIN_FILES", "Part", "check_partial", "part_of"]

Part: TypeAlias = Literal["whole", "val_only", "rollout_only", "train_only", "verify_only"]
READ_TRAIN_FILES: Final = frozenset[Part]({"whole", "rollout_only", "verify_only"})
"""Parts that read `data.train_files`."""


def part_of(config: RunConfig) -> Part:
    """Return the part of a run that `config` asks for."""
    if config.trainer.val_only:
        return "val_only"
    if config.trainer.rollout_only:
        return "rollout_only"
    if config.trainer.verify_only:
        return "verify_only"
    return "train_only" if config.data.rollout_files else "whole"


def check_partial(config: RunConfig) -> Iterator[Mistake]:
    """Yield what contradicts the part that is asked for."""
    data, trainer = config.data, config.trainer
    chosen = {
        "trainer.val_only": trainer.val_only,
        "trainer.rollout_only": trainer.rollout_only,
        "trainer.verify_only": trainer.verify_only,
        "data.rollout_files": bool(data.rollout_files),
    }
    keys = [key for key, asked in chosen.items() if asked]
    if len(keys) > 1:
        yield Mistake(key=keys[1], text=f"and {keys[0]} are both set: choose one", uses=(keys[0],))
    if trainer.val_only and not data.val_files:
        yield Mistake(key="trainer.val_only", text="is true, and data.val_files is empty: name held-out files")
    if trainer.rollout_only and trainer.test_freq != -1:
        text = f"must be -1 for trainer.rollout_only=true, got {trainer.test_freq}: the weights stay the same"
        yield Mistake(key="trainer.test_freq", text=text, uses=("trainer.rollout_only",))
    if not data.rollout_files:
        return
    if data.val_files:
        text = "must be [] with data.rollout_files: no replica is started that could answer held-out prompts"
        yield Mistake(key="data.val_files", text=text, uses=("data.rollout_files",))
    if trainer.total_epochs != 1:
        text = f"must be 1 with data.rollout_files, got {trainer.total_epochs}: a saved group is trained on once"
        yield Mistake(key="trainer.total_epochs", text=text, uses=("data.rollout_files",))
