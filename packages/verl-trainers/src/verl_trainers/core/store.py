"""Finished groups between rollout and training. Tokens stay where they were made; only references are held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_contracts.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.samples import GroupResult, GroupUid
    from verl_contracts.training import ExperienceStore

__all__ = ["GroupStore"]


class GroupStore:
    """A dictionary by uid that gives each group out once."""

    def __init__(self) -> None:
        self._groups: dict[GroupUid, GroupResult] = {}

    def put(self, result: GroupResult, /) -> None:
        """Keep `result`."""
        if result.uid in self._groups:
            raise StateError(f"group {result.uid} is in the store already")
        self._groups[result.uid] = result

    def take(self, uids: Sequence[GroupUid], /) -> tuple[GroupResult, ...]:
        """Remove and return these groups."""
        missing = [str(uid) for uid in uids if uid not in self._groups]
        if missing:
            raise StateError(f"not in the store: {', '.join(missing)}")
        return tuple(self._groups.pop(uid) for uid in uids)

    def discard(self, uid: GroupUid, /) -> None:
        """Forget `uid`."""
        self._groups.pop(uid, None)

    def __len__(self) -> int:
        return len(self._groups)


if TYPE_CHECKING:

    def _is_store(x: GroupStore) -> ExperienceStore:
        return x
