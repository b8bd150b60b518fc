"""One tree of errors. Each is also the built-in kind that a caller without this package would catch.

Every error passes all its arguments to `super().__init__`, so that it survives pickling between processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_contracts.failures import FailureRecord

__all__ = [
    "ActorFailed",
    "ConfigError",
    "ContractVersionError",
    "DataError",
    "NoHealthyReplica",
    "PluginError",
    "ResourcesError",
    "RewardError",
    "RunFailed",
    "StateError",
    "VerlError",
    "WaitTimeout",
    "WeightSyncError",
]


class VerlError(Exception):
    """Root of every error that this project raises on purpose."""


class ConfigError(VerlError, ValueError):
    """A configuration that cannot run. The message names the key, the value and the fix."""


class PluginError(ConfigError):
    """A plug-in that cannot be found, imported or used. Raised before anything is started."""


class ContractVersionError(PluginError):
    """A plug-in written for a contract version that this installation does not offer."""


class DataError(VerlError, ValueError):
    """A data set or a row that cannot be used."""


class RewardError(VerlError, RuntimeError):
    """A reward that could not be computed. It is an outcome of its own, never a score of 0."""


class StateError(VerlError, RuntimeError):
    """An operation that is not legal in the present state, for example generating before the first weight sync."""


class ResourcesError(VerlError, RuntimeError):
    """Resources that do not exist or are held by somebody. Carries what was wanted, what is free, and who holds it."""


class NoHealthyReplica(VerlError, RuntimeError):
    """No replica is left that may serve. The message lists each replica with its first error."""


class RunFailed(VerlError, RuntimeError):
    """A training run that had to stop. The message begins with the first cause."""


class WaitTimeout(VerlError, TimeoutError):
    """A bounded wait that ran out: `subject` was awaited, `holder` should have provided it.

    `setting` is the config key that the limit comes from, empty when it comes from none.
    """

    def __init__(self, subject: str, holder: str, limit_s: float, setting: str = "") -> None:
        super().__init__(subject, holder, limit_s, setting)
        self.subject = subject
        self.holder = holder
        self.limit_s = limit_s
        self.setting = setting

    def __str__(self) -> str:
        named = f"; the limit is {self.setting}" if self.setting else ""
        return f"waited {self.limit_s:.3g} s for {self.subject}, held by {self.holder}{named}"


class ActorFailed(VerlError, RuntimeError):
    """A spawned process died, could not start, or stopped answering. `record` says which, where and why."""

    def __init__(self, record: FailureRecord) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return str(self.record)


class WeightSyncError(VerlError, RuntimeError):
    """A weight transfer that did not complete. Names the phase, the tensor and the peers missing.

    `phase` is one of `verl_contracts.weights.PHASES`; `tensor` is None outside the transfer of a tensor; `missing`
    lists the ranks or replicas that did not answer and is empty when all did.
    """

    def __init__(self, phase: str, reason: str, tensor: str | None = None, missing: Sequence[str] = ()) -> None:
        super().__init__(phase, reason, tensor, tuple(missing))
        self.phase = phase
        self.reason = reason
        self.tensor = tensor
        self.missing = tuple(missing)

    def __str__(self) -> str:
        at = f" at tensor {self.tensor!r}" if self.tensor is not None else ""
        who = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return f"weight sync failed in phase {self.phase!r}{at}: {self.reason}{who}"
