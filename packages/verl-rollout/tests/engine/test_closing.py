"""The compute thread ends with its engine, and with the process at the latest."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from engine_models import opened, request_of, settings_of, soon
from test_engine import LONG, long_engine, start, until_decoding

from verl_contracts.errors import StateError

if TYPE_CHECKING:
    from engine_models import Tiny

ABANDON = """
import asyncio, sys
from pathlib import Path
from engine_models import CLOCK, build, config_of, settings_of, soon, request_of, sync
from verl_rollout.engine.torch.engine import TorchEngine

async def main():
    engine = TorchEngine.create(settings_of(Path(sys.argv[1]), max_model_len=2010), replica_id="r", rank=0, clock=CLOCK)
    await engine.pause("abort", deadline=soon())
    await sync(engine, build(config_of("qwen2")), 1)
    await engine.resume()
    asyncio.get_running_loop().create_task(engine.generate(request_of([1], max_tokens=2000), deadline=soon()))
    async with asyncio.timeout(20):
        while not engine.status().generated_tokens:
            await asyncio.sleep(0)
    raise SystemExit(7)

asyncio.run(main())
"""


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("engine-")}


async def test_no_thread_is_left_when_a_decoding_engine_was_closed(qwen: Tiny) -> None:
    async with long_engine(qwen) as engine:
        task = start(engine, request_of([1], max_tokens=LONG))
        await until_decoding(engine)
        assert threads() == {"engine-replica-0"}
        await engine.close()
        assert threads() == set()
        with pytest.raises(StateError, match="was closed"):
            await task


async def test_no_thread_is_left_when_a_dead_engine_was_closed(qwen: Tiny) -> None:
    async with opened(settings_of(qwen.path), qwen.model) as engine:
        with torch.no_grad():
            next(p for name, p in engine._model.named_parameters() if "o_proj" in name).data = torch.zeros(3, 3)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            await engine.generate(request_of([1]), deadline=soon())
        await engine.close()
        assert threads() == set()


def test_the_process_ends_in_order_when_a_decoding_engine_is_abandoned(qwen: Tiny) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ABANDON, str(qwen.path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (7, "")
    assert "terminate" not in ended.stderr
