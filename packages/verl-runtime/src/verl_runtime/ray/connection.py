"""One connection to Ray for all the runtimes of a process.

Ray knows one connection a process, so runtimes share it, and only the last one to leave ends it, and only if it was
opened here: a Ray that somebody else started is left as it was found.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError, ResourcesError, StateError
from verl_runtime.processes import MARK
from verl_runtime.ray.guardian import Guardian

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Connection", "require_connection", "require_ray"]

_log = logging.getLogger(__name__)


def require_connection() -> None:
    """Raise `StateError` when this process has left Ray; Ray itself would start a new cluster unasked."""
    import ray

    if not ray.is_initialized():
        raise StateError("this process is not connected to Ray: its runtime is closed")


def require_ray() -> None:
    """Raise `ConfigError` with the fix when Ray is not installed."""
    # Ray would print each death on the driver's standard output; they go through the failure channel. Read at import.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    try:
        import ray  # noqa: F401
    except ImportError as exc:
        raise ConfigError("the Ray runtime needs Ray: pip install 'verl-runtime[ray]'") from exc


class Connection:
    """A share in this process's connection to Ray. `close` gives it back; the last share to go disconnects."""

    _shares = 0
    _opened_here = False
    _guardian: Guardian | None = None
    """Ends the processes of a Ray that was started here; Ray's own way of doing so is not certain under load."""

    def __init__(self, *, address: str | None, num_cpus: int | None, object_store_mb: int) -> None:
        require_ray()
        import ray

        self._open = True
        if not ray.is_initialized():
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            where = "start Ray on this machine" if address is None else f"reach Ray at {address!r}"
            try:
                if address is None:
                    _start(num_cpus=num_cpus, object_store_mb=object_store_mb)
                else:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, OSError, RuntimeError, ValueError) as exc:
                raise ResourcesError(f"could not {where}: {exc}") from exc
            Connection._opened_here = True
        Connection._shares += 1

    @property
    def alone(self) -> bool:
        """Whether nobody but this runtime can hold devices of the cluster."""
        return Connection._guardian is not None and Connection._shares == 1

    def close(self) -> None:
        """Give the share back. Harmless when done twice."""
        if not self._open:
            return
        self._open = False
        Connection._shares -= 1
        if Connection._shares == 0 and Connection._opened_here:
            import ray

            Connection._opened_here = False
            ray.shutdown()
            if Connection._guardian is not None:
                Connection._guardian.close()
                Connection._guardian = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(*, num_cpus: int | None, object_store_mb: int) -> None:
    """Start Ray for this process alone, with a guardian that knows its processes by their mark."""
    import ray

    cluster = f"verl-cluster-{os.getpid()}-{secrets.token_hex(4)}"
    guardian = Guardian(namespace=cluster, folder=None)
    # Without the second, a process of Ray that sets its title writes over its environment, and so over the mark.
    ours = {MARK: f"{cluster}/ray", "SPT_NOENV": "1"}
    outer = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_mb * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except BaseException:
        guardian.close()
        raise
    finally:
        for name, value in outer.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    Connection._guardian = guardian
