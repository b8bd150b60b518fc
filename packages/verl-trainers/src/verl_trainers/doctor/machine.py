"""What this machine, or this container, offers to a run. Reads files below /proc and /sys; starts nothing."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MachineRow", "examine_machine"]

GIB = 1024**3
LEAST_SHM_BYTES = GIB
"""Ray keeps objects in /dev/shm, and falls back to the slower disk below that."""
LEAST_FILES = 4096
"""Ray opens many; its own advice is 65536."""
UNLIMITED = 1 << 60
"""Limits of control groups above this mean none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """One resource."""

    name: str
    value: str
    advice: str | None = None
    """What would be better; None when it is enough."""


def examine_machine() -> list[MachineRow]:
    """Return cores, memory, GPUs, shared memory and the limit of open files."""
    return [_cores(), _memory(), *_gpus(), _shared_memory(), _files()]


def _cores() -> MachineRow:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    limit = f", limited to {int(quota) / int(period):g} by the container" if quota.isdigit() else ""
    return MachineRow(name="cores", value=f"{usable}{limit}")


def _memory() -> MachineRow:
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    sizes = {name: int(text.split()[0]) * 1024 for name, text in lines.items() if text.strip().endswith("kB")}
    if "MemTotal" not in sizes:
        return MachineRow(name="memory", value="unknown")
    text = f"{sizes['MemTotal'] / GIB:.1f} GiB, {sizes.get('MemAvailable', 0) / GIB:.1f} GiB available"
    limit = _read("/sys/fs/cgroup/memory.max")
    if limit.isdigit() and int(limit) < min(sizes["MemTotal"], UNLIMITED):
        text += f", limited to {int(limit) / GIB:.1f} GiB by the container"
    return MachineRow(name="memory", value=text)


def _gpus() -> list[MachineRow]:
    try:
        import torch
    except Exception:  # what is wrong with torch is told where software is examined
        return [MachineRow(name="GPU", value="unknown, since torch cannot be imported")]
    if torch.cuda.is_available():
        rows = []
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            rows.append(MachineRow(name=f"GPU {index}", value=f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB"))
        return rows
    if Path("/dev/nvidia0").exists():
        advice = f"there is a GPU that torch {torch.__version__} cannot use: install a CUDA build that fits the driver"
        return [MachineRow(name="GPU", value="none that torch can use", advice=advice)]
    return [MachineRow(name="GPU", value="none")]


def _shared_memory() -> MachineRow:
    folder = Path("/dev/shm")  # the place itself is asked about
    if not folder.is_dir():
        return MachineRow(name="/dev/shm", value="none")
    usage = shutil.disk_usage(folder)
    value = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if usage.free >= LEAST_SHM_BYTES:
        return MachineRow(name="/dev/shm", value=value)
    advice = f"/dev/shm: {value}; Ray wants more: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    return MachineRow(name="/dev/shm", value=value, advice=advice)


def _files() -> MachineRow:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= LEAST_FILES or soft == resource.RLIM_INFINITY:
        return MachineRow(name="open files", value=f"{soft} (at most {hard})")
    advice = f"open files: at most {soft} at once; Ray wants more: ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    return MachineRow(name="open files", value=f"{soft} (at most {hard})", advice=advice)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
