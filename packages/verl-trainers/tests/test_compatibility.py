"""The page of tested versions and recipes says what is in the tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_in_step_with_what_it_is_made_from() -> None:
    command = [sys.executable, str(ROOT / "tools" / "compatibility.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
