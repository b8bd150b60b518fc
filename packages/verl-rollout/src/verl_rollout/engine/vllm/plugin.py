"""What vLLM loads into each of its processes, by the entry-point group ``vllm.general_plugins``."""

from __future__ import annotations

import contextlib
from typing import Final

from verl_rollout.engine.vllm.causes import leave_interrupts, report_errors

__all__ = ["NAME", "register"]

NAME: Final = "verl"
"""Name of our weight-transfer backend in vLLM's registry, and of the plug-in itself."""


def register() -> None:
    """Register the weight-transfer backend that hosts our receivers. Imports nothing more until it is chosen."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # this process has loaded the plug-in before
        WeightTransferEngineFactory.register_engine(
            NAME, "verl_rollout.engine.vllm.worker_side.receiver", "HostedReceiver"
        )
    report_errors()
    leave_interrupts()
