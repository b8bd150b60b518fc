"""Starting vLLM: its environment, its arguments, its processes."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl_contracts.errors import ConfigError
from verl_rollout.engine.vllm.arguments import engine_arguments
from verl_rollout.engine.vllm.builds import check_installed, on_cpu
from verl_rollout.engine.vllm.causes import VARIABLE
from verl_rollout.engine.vllm.plugin import NAME
from verl_rollout.engine_family import ENGINE_OPTIONS_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.v1.engine.async_llm import AsyncLLM

    from verl_contracts.rollout import RolloutSettings
    from verl_rollout.engine.vllm.causes import Causes
    from verl_rollout.engine.vllm.options import VLLMOptions

__all__ = ["cores_of", "environment_of", "launch", "start"]

_log = logging.getLogger(__name__)

_LONGEST = 500
"""Most characters that are told of what vLLM says."""
_ONE_AT_A_TIME = threading.Lock()
"""The environment belongs to the process, and several replicas may start in one."""


def start(settings: RolloutSettings, options: VLLMOptions, *, rank: int, causes: Causes) -> AsyncLLM:
    """Start vLLM and return once it could serve; its processes report to `causes`.

    Raises `ConfigError` for arguments that it refuses, `RuntimeError` with the first cause when it does not come up.
    """
    release = check_installed()
    arguments = engine_arguments(settings, options, rank=rank)
    folder = tempfile.mkdtemp(prefix="verl-vllm-")  # for sockets, which vLLM does not remove when it ends badly
    weakref.finalize(causes, shutil.rmtree, folder, ignore_errors=True)
    own = {VARIABLE: causes.path, "VLLM_RPC_BASE_PATH": folder}
    environment = {**environment_of(settings, options, rank=rank), **own}
    _log.info("starting vLLM %s for replica %d", release, rank)
    _log.debug("with the arguments %s", arguments)
    try:
        return launch(arguments, environment)
    except ValueError as exc:
        said = " ".join(str(exc).split())[:_LONGEST]
        raise ConfigError(f"{ENGINE_OPTIONS_KEY}: vLLM {release} refuses its settings: {said}") from None
    except Exception as exc:
        cause = causes.first()
        if cause is None:
            # A spawned process runs the script again, and ends before it can log where that would start yet another.
            raise RuntimeError(
                f"vLLM {release} did not start, and logged no error: {type(exc).__name__}: {exc}; of a script, what "
                'starts replicas must stand under if __name__ == "__main__"'
            ) from exc
        # Its own exception, which says that the cause is above, would be taken for the first cause.
        raise RuntimeError(f"vLLM {release} did not start: {cause}") from None


def launch(arguments: Mapping[str, object], environment: Mapping[str, str | None]) -> AsyncLLM:
    """Start vLLM with the arguments of its `AsyncEngineArgs`; raises what vLLM raises."""
    with _ONE_AT_A_TIME, _set(environment):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def cores_of(settings: RolloutSettings, options: VLLMOptions, *, rank: int, allowed: list[int]) -> list[int] | None:
    """Return the cores of replica `rank` among `allowed`, one per device; None where there are too few to pin."""
    each = settings.devices_per_replica
    if options.cpu_cores is not None:
        if missing := sorted(set(options.cpu_cores) - set(allowed)):
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs.cpu_cores: this process may not use {missing}, only {allowed}"
            )
        if len(options.cpu_cores) < each:
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs.cpu_cores: {list(options.cpu_cores)} are fewer than the "
                f"{each} devices of a replica"
            )
        return list(options.cpu_cores)
    if each > len(allowed):
        return None
    first = (rank * each) % (len(allowed) // each * each)
    return allowed[first : first + each]


def environment_of(settings: RolloutSettings, options: VLLMOptions, *, rank: int) -> dict[str, str | None]:
    """Return the variables that vLLM reads while it starts, None for unset; its processes inherit them."""
    found: dict[str, str | None] = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
        "VLLM_NO_USAGE_STATS": "1",
        "SPT_NOENV": "1",  # its processes set titles, and would write over what they are found by when we are gone
        # What vLLM warns of at each start is nobody's business who did not write it.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and NAME not in plugins.split(","):
        found["VLLM_PLUGINS"] = f"{plugins},{NAME}".strip(",")
    if on_cpu():
        found["VLLM_CPU_KVCACHE_SPACE"] = None  # it would override what we say, in whole GiB
        cores = cores_of(settings, options, rank=rank, allowed=sorted(os.sched_getaffinity(0)))
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if cores is None else _binding(cores, settings)
    return found


def _binding(cores: list[int], settings: RolloutSettings) -> str:
    """Return the cores as vLLM takes them: an equal share for each worker, those of one copy of the model together."""
    workers = settings.devices_per_replica
    share = len(cores) // workers
    parts = [cores[index * share : (index + 1) * share] for index in range(workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


@contextmanager
def _set(environment: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    _put(environment)
    try:
        yield
    finally:
        _put(before)


def _put(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
