"""Importing contracts is cheap and needs nothing but the standard library and typing-extensions."""

from __future__ import annotations

import importlib
import pkgutil
import resource
import statistics
import subprocess
import sys

import pytest

import verl_contracts

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(verl_contracts.__path__, "verl_contracts.")
    if not info.name.startswith("verl_contracts.testing")
)
KIT = sorted(
    info.name
    for info in pkgutil.walk_packages(verl_contracts.__path__, "verl_contracts.")
    if info.name.startswith("verl_contracts.testing")
)
HEAVY = ("torch", "numpy", "ray", "vllm", "transformers", "flash_attn", "omegaconf", "pydantic", "pytest", "hypothesis")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_imports_without_heavy_packages() -> None:
    blocked = f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
    printed = _python(blocked + "\n".join(f"import {name}" for name in MODULES) + "\nprint('all')")
    assert printed.strip() == "all"


def test_kit_without_pytest_names_its_extra_or_does_without() -> None:
    code = (
        f"import importlib, sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
        f"for name in {KIT!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as exc: print(name, exc)"
    )
    refused = _python(code).splitlines()
    assert refused
    assert all(".testing.suites" in line and "verl-contracts[testing]" in line for line in refused), refused


def test_only_the_standard_library_and_typing_extensions_are_imported() -> None:
    code = "\n".join(f"import {name}" for name in MODULES)
    printed = _python(
        f"import sys\nbefore = set(sys.modules)\n{code}\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    assert set(printed.split()) <= {"verl_contracts", "typing_extensions"}


def _cpu_seconds(code: str) -> float:
    """Return what a Python spends on `code`, start-up included: unlike elapsed time, it does not grow with load."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("code", "limit_s"), [("import verl_contracts", 0.060), ("\n".join(f"import {name}" for name in MODULES), 0.400)]
)
def test_import_is_quick(code: str, limit_s: float) -> None:
    extra = [_cpu_seconds(code) - _cpu_seconds("pass") for _ in range(7)]
    assert statistics.median(extra) < limit_s, f"takes {1000 * statistics.median(extra):.0f} ms"


@pytest.mark.parametrize("name", [*MODULES, *KIT])
def test_all_is_sorted_complete_and_true(name: str) -> None:
    if ".suites.weights" in name or ".suites.training" in name:
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    exported: list[str] = module.__all__
    assert exported == sorted(exported, key=_as_ruff_sorts), "sorted as ruff does"
    for entry in exported:
        assert hasattr(module, entry), f"{name}.__all__ names {entry}, which is not there"
    defined = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, type) and value.__module__ == name
    }
    assert defined <= set(exported), f"{name} defines {defined - set(exported)} and does not export it"


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    if name.isupper():
        return 0, name
    return (1, name) if name[0].isupper() else (2, name)
