"""Host memory and cores that are there to be used, the folder for what is kept between runs, and the system's own words."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

_CGROUPS = (  # limit, usage, statistics: version 2, then version 1
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def reason(error: OSError) -> str:
    """The operating system's own words, and the file if it is about one."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def crowded(*n_threads: int | None) -> list[str]:
    """A sentence for the user if so many threads were asked for that they have no cores."""
    most, n_cores = max((n for n in n_threads if n is not None), default=0), len(os.sched_getaffinity(0))
    if most <= n_cores:
        return []
    return [
        f"{most} threads share {n_cores} cores: they wait for one another at every operation, give at most {n_cores} (-t)"
    ]


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) bytes: what Linux could give without swapping, or what a container's limit leaves of it.

    root: for tests. (0, 0) where the kernel does not tell."""
    try:
        meminfo = _numbers(root / "proc/meminfo")
        available, total = meminfo["MemAvailable:"] << 10, meminfo["MemTotal:"] << 10
    except (OSError, KeyError):
        return 0, 0
    for limit_file, usage_file, stat_file in _CGROUPS:
        folder = root / "sys/fs/cgroup"
        try:
            limit, usage = (int((folder / name).read_text()) for name in (limit_file, usage_file))
            # the page cache counts as used, but is given back when somebody wants it
            cached = _numbers(folder / stat_file).get("inactive_file", 0)
        except (OSError, ValueError):  # no such version, or no limit: "max"
            continue
        if limit < total:
            available, total = min(available, max(0, limit - usage + cached)), limit
    return available, total


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    words = (line.split() for line in path.read_text().splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The user's cache folder for this project; it need not exist. XDG_CACHE_HOME counts if absolute, as its standard says.
    FileNotFoundError: nobody knows where this user's home is, as in some containers."""
    base = environment.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "moespac"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder: set HOME or XDG_CACHE_HOME") from error
