"""What vLLM's processes died of reaches the replica that started them, and nothing is left when it is gone."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_contracts.errors import WeightSyncError
from verl_rollout.engine.vllm import causes as module
from verl_rollout.engine.vllm.causes import VARIABLE, Causes, report_errors

LOGS = """
import logging, sys
from verl_rollout.engine.vllm.causes import report_errors
report_errors()
log = logging.getLogger("vllm.somewhere")
log.warning("no error")
try:
    raise ValueError("a head\\nof size 24")
except ValueError:
    log.exception("failed")
log.error("the engine of %s is dead", "it")
"""


def run(causes: Causes, code: str = LOGS) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={VARIABLE: causes.path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_first_of_errors_that_come_together_is_the_cause() -> None:
    causes = Causes()
    assert causes.first() is causes.last() is None
    run(causes)
    assert causes.last() == "ValueError: a head of size 24"


def test_errors_of_long_ago_are_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BURST_S", 0.0)
    causes = Causes()
    run(causes)
    assert causes.last() == "the engine of it is dead"
    assert causes.first() == "ValueError: a head of size 24"


def test_the_replica_itself_and_our_own_errors_do_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    causes = Causes()
    monkeypatch.setenv(VARIABLE, causes.path)
    report_errors()
    logging.getLogger("vllm").error("in the replica")
    record = logging.LogRecord("vllm", logging.ERROR, "", 0, "failed", None, None)
    error = WeightSyncError("transfer", "half a load")
    record.exc_info = (type(error), error, None)
    module._Reporter(causes.path).emit(record)
    assert causes.last() is None


def test_the_file_goes_with_its_owner() -> None:
    causes = Causes()
    path = Path(causes.path)
    assert path.exists()
    del causes
    assert not path.exists()
    run_without = f"import os; os.environ['{VARIABLE}'] = '{path}'\n{LOGS}"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", run_without], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, time.monotonic() - begun < 30) == (0, True), done.stderr
