"""A cluster of two nodes, joined rather than started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_devices_on_two_nodes_are_told_apart() -> None:
    pytest.importorskip("ray", reason="the tests of RayRuntime need ray: pip install 'verl-runtime[ray]'")
    script = Path(__file__).with_name("nodes_for_tests.py")
    ran = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    seen = json.loads(ran.stdout.splitlines()[-1])
    refused = seen["strict_pack"]
    assert "pool 'packed' wants 2 x (1 CPU, 0 GPU), strategy 'strict_pack'" in refused
    assert refused.count(": 1 CPU, 0 GPU") == 2, "free on each node"
    assert seen["nodes"] == 2
    assert "pool 'late' wants" in seen["other_run"]
    assert "held by placement group" in seen["other_run"]
    assert seen["other_holder"], "the other run is named"
    assert seen["jobs_ran_on_their_node"]
    assert seen["relay"] == [0, 1]
