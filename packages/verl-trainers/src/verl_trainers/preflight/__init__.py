"""What can be known before a run: mistakes in configuration, data and model, and whether devices and memory suffice.

report = preflight_file(Path("recipe.yaml"), ["trainer.mode=sync"])
"""

from __future__ import annotations

from verl_trainers.preflight.checks import preflight, preflight_file
from verl_trainers.preflight.report import Report, wants_color

__all__ = ["Report", "preflight", "preflight_file", "wants_color"]
