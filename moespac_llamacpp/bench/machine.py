"""What a result was measured on and by what."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from moespac_llamacpp import __version__


def n_cores() -> int:
    return len(os.sched_getaffinity(0))


def describe(hello: dict[str, Any], commit: str = "") -> dict[str, Any]:
    """hello: what the workers said of themselves, by name."""
    ours = hello["ours"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["moespac", *sys.argv[1:]]),
        "commit": commit
        or _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"),
        "cpu": _cpu(),
        "cores": n_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "device": f"{ours['device']}: {ours['description']}",
        "driver": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "moespac_llamacpp": __version__,
        "workers": hello,
    }


def short(machine: dict[str, Any]) -> str:
    """For a cell of a table."""
    device = str(machine["device"]).partition(": ")[2]
    cpu = str(machine["cpu"])
    return f"{machine['cores']} cores of {cpu}" + ("" if device == cpu else f", {device}")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _output(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
